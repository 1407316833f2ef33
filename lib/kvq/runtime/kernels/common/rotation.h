#pragma once

#include <kvq/runtime/kernels/common/linear_taps.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// Rotation of one side as kernels that read a cache apply it; per KV head, or one for all if `per_head` is false. With
/// A as in plan/rotation.h: queries are multiplied by the keys' A^-T, which is A itself if A is orthogonal; outputs are
/// multiplied by the values' A^-1. The memory must not change while work is enqueued, because kernels read it before
/// the kernels ahead of them have ended.
struct DeviceRotation {
  int order = 0;  ///< Hadamard blocks of this many channels; 0 = none
  bool per_head = false;
  const std::int8_t* signs = nullptr;    ///< [H, D] +1, -1, with `order`; may be null
  const float* matrix = nullptr;         ///< [H, D, D] row-major: A^-T of keys, A^-1 of values; null if not dense. Wins
                                         ///< over `order`
  const std::byte* fragments = nullptr;  ///< the matrix for decode (decode/rotation_layout.h), aligned to 16; with
                                         ///< `matrix`
  const float* factors = nullptr;        ///< [H, D] sign / channel_scale, instead of `signs`; with `order`, or null
  const float* sizes = nullptr;  ///< [H, D] power of two above the largest magnitude of each column of A^-1. Null
                                 ///< with `matrix`: A is orthogonal, and all are 1
  LinearTaps taps = {};          ///< of linear rows, for decode
  /// For dequantization of rows in bit tiles: row_matrices(), aligned to 16, or null.
  const std::byte* row_matrices = nullptr;
};

}  // namespace kvq
