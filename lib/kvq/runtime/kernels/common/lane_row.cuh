#pragma once

#include <kvq/runtime/kernels/common/constants.cuh>

/// Rows in the registers of a warp.
namespace kvq {

/// A row as one warp holds it: lane l has the channels l + 32 j.
template <int kDim>
using LaneRow = float[kDim / 32];

/// Walsh-Hadamard transform of each block of `order` channels of a row, without the factor 1 / sqrt(order). All lanes
/// of one warp call it.
template <int kDim>
__device__ __forceinline__ void transform(LaneRow<kDim>& x, int order, int lane) {
  constexpr int kEach = kDim / 32;
#pragma unroll
  for (int half = 1; half < 32; half *= 2) {
    if (half >= order) break;
#pragma unroll
    for (float& own : x) {
      const float other = __shfl_xor_sync(kAll, own, half);
      own = lane & half ? other - own : own + other;
    }
  }
#pragma unroll
  for (int step = 1; step < kEach; step *= 2) {
    if (32 * step >= order) break;
#pragma unroll
    for (int j = 0; j + step < kEach; ++j) {
      if (j & step) continue;
      const float a = x[j], b = x[j + step];
      x[j] = a + b, x[j + step] = a - b;
    }
  }
}

}  // namespace kvq
