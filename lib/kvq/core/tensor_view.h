#pragma once

#include <kvq/core/dtype.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// Activations of one layer, [T, H, D] row-major, that somebody else owns.
struct TensorView {
  DType dtype = DType::f32;  ///< f16, bf16 or f32
  std::int64_t tokens = 0;
  int heads = 0, dim = 0;
  const std::byte* data = nullptr;

  /// Tokens [first, first + count) of one head, widened. @param out  [count, dim]
  void load_head(int head, std::int64_t first, std::int64_t count, float* out) const;
};

}  // namespace kvq
