#pragma once

#include <kvq/core/dtype.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <span>

namespace kvq {

/// Looks at raw bits of f16, bf16 or f32 data, block after block: is all of it finite and of a magnitude below
/// `limit` (above the largest float16), and is anything not zero? A few instructions per vector register; a layer is
/// checked at the speed of memory.
class NumberCheck {
 public:
  explicit NumberCheck(DType type, float limit = std::numeric_limits<float>::infinity()) : type_(type), limit_(limit) {}
  void add(std::span<const std::byte> block);                          ///< whole elements
  std::optional<std::size_t> first_bad() const { return first_bad_; }  ///< index of the first that is not
  bool all_zero() const { return !any_nonzero_; }

 private:
  DType type_;
  float limit_;
  std::size_t count_ = 0;
  std::optional<std::size_t> first_bad_;
  bool any_nonzero_ = false;
};

}  // namespace kvq
