#pragma once

#include <kvq/core/dtype.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <span>

namespace kvq {

/// Every stored number must be smaller, so that all that calibration computes in float32 is finite. The largest is a
/// weight of the moment `sst`, k C_Q k^T, and the energy of a RoPE block: up to 1e7^4 * head_dim 1024^2 < 2^114. What
/// is left up to 2^127 is for rope_attention_factor^4.
inline constexpr float kMostMagnitude = 1e7f;
/// The same after RoPE, which may add a factor of sqrt(2) times rope_attention_factor (up to 100).
inline constexpr float kMostRotatedMagnitude = 1.5e9f;

/// Checks raw f16, bf16 or f32 data block by block: whether every number is finite with a magnitude below `limit`, and
/// whether any number is not zero. For f16, `limit` must exceed 65504. The check compares bits of whole vector
/// registers.
class NumberCheck {
 public:
  explicit NumberCheck(DType type, float limit = std::numeric_limits<float>::infinity()) : type_(type), limit_(limit) {}
  void add(std::span<const std::byte> block);                          ///< whole elements
  std::optional<std::size_t> first_bad() const { return first_bad_; }  ///< index of the first number that fails
  bool all_zero() const { return !any_nonzero_; }

 private:
  DType type_;
  float limit_;
  std::size_t count_ = 0;
  std::optional<std::size_t> first_bad_;
  bool any_nonzero_ = false;
};

}  // namespace kvq
