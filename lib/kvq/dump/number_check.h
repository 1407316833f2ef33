#pragma once

#include <kvq/core/dtype.h>

#include <cstddef>
#include <optional>
#include <span>

namespace kvq {

/// Looks at raw bits of f16, bf16 or f32 data, block after block: is all of it finite, and is anything not zero?
/// A few instructions per vector register; a layer is checked at the speed of memory.
class NumberCheck {
 public:
  explicit NumberCheck(DType type) : type_(type) {}
  void add(std::span<const std::byte> block);                          ///< whole elements
  std::optional<std::size_t> first_bad() const { return first_bad_; }  ///< index of the first NaN or infinity
  bool all_zero() const { return !any_nonzero_; }

 private:
  DType type_;
  std::size_t count_ = 0;
  std::optional<std::size_t> first_bad_;
  bool any_nonzero_ = false;
};

}  // namespace kvq
