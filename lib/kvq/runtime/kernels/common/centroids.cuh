#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/generic_rows.cuh>

/// Distances of rows from centroids as packing.md says ("Centroids"). A warp takes a row at a time.
namespace kvq::generic {

/// tree() of packing.md. All lanes of a warp call it and get the sum. @param term  i -> float, i < count
/// @tparam kMostDim  most terms
template <int kMostDim = kGenericHeadDim, typename Term>
__device__ __forceinline__ float tree_of(int count, Term term, int lane) {
  int width = 1;
  while (width < count) width *= 2;
  const int each = max(1, width / 32);  // neighbors of a lane
  float y[kMostDim / 32];
#pragma unroll
  for (int i = 0; i < kMostDim / 32; ++i) {
    const int at = lane * each + i;
    y[i] = i < each && at < count ? term(at) : 0.0f;
  }
  float sum = y[0];
#pragma unroll
  for (int half = 1; half < kMostDim / 32; half *= 2) {  // sums of 2 * half neighbors
#pragma unroll
    for (int i = 0; i < kMostDim / 32; i += 2 * half) y[i] = __fadd_rn(y[i], y[i + half]);
    if (2 * half <= each) sum = y[0];
  }
  for (int step = 1; step < min(32, width); step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, step));
  return __shfl_sync(kAll, sum, 0);
}

/// A sum from the first term on.
struct SumOfSegments {
  float value = 0.0f;
  bool any = false;
  __device__ __forceinline__ void add(float x) { value = any ? __fadd_rn(value, x) : x, any = true; }
};

/// A channel of a head's unrotated centroid.
__device__ __forceinline__ const float* centroid_channel(const RowCode& code, int head, int centroid, int dim,
                                                         int channel) {
  return code.centroids + (static_cast<std::int64_t>(code.per_head ? head : 0) * code.num_centroids + centroid) * dim +
         channel;
}

/// Squared distance of an unrotated row from a centroid of its head, in the order of packing.md. All lanes of a warp
/// call it and get the sum. @param x  channel -> float
template <typename X>
__device__ __forceinline__ float centroid_distance(const RowCode& code, int head, int centroid, int dim, X x,
                                                   int lane) {
  const float* from = centroid_channel(code, head, centroid, dim, 0);
  return tree_of(
      dim,
      [&](int i) {
        const float difference = __fsub_rn(x(i), __ldg(from + i));
        return __fmul_rn(difference, difference);
      },
      lane);
}

}  // namespace kvq::generic
