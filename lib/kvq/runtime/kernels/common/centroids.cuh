#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/generic_rows.cuh>

/// Distances of rows from centroids as packing.md says ("Centroids"). A warp takes a row at a time.
namespace kvq::generic {

/// tree() of packing.md. All lanes of a warp call it and get the sum. @param term  i -> float, i < count
template <typename Term>
__device__ __forceinline__ float tree_of(int count, Term term, int lane) {
  int width = 1;
  while (width < count) width *= 2;
  const int each = max(1, width / 32);  // neighbors of a lane
  float y[kMostEach];
#pragma unroll
  for (int i = 0; i < kMostEach; ++i) {
    const int at = lane * each + i;
    y[i] = i < each && at < count ? term(at) : 0.0f;
  }
  const float two = __fadd_rn(y[0], y[1]), four = __fadd_rn(two, __fadd_rn(y[2], y[3])),
              eight = __fadd_rn(four, __fadd_rn(__fadd_rn(y[4], y[5]), __fadd_rn(y[6], y[7])));
  float sum = each == 1 ? y[0] : each == 2 ? two : each == 4 ? four : eight;
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
