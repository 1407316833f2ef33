#pragma once

#include <kvq/compute/cuda/kmeans_kernels.h>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

// What kernels of k-means have in common. Distances and means have the order of operations of compute/kmeans.cpp, so
// the same assignment gives the same centroids.

namespace kvq::cuda {

constexpr unsigned kAll = 0xFFFFFFFFu;

template <typename T>
__device__ __forceinline__ T sum_of_warp(T x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}
/// The sum over the threads of a block, for thread 0. @param memory  [blockDim.x / 32]
__device__ inline double sum_of_block(double x, double* memory) {
  x = sum_of_warp(x);
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0.0;
  if (threadIdx.x == 0)
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += memory[warp];
  return total;
}

/// A lane's channels of a row or centroid as float16, and the norms of the row and of what float16 leaves out.
/// @param x  of a channel
template <typename F>
__device__ __forceinline__ float2 round_to_halves(const Clustering& c, std::uint16_t* halves, F x) {
  double norm = 0.0, rest = 0.0;
  for (int j = static_cast<int>(threadIdx.x % 32); j < c.padded_dim; j += 32) {
    const float value = x(j);
    const __half half = __float2half_rn(value);
    const double left = double{value} - double{__half2float(half)};
    halves[j] = __half_as_ushort(half);
    norm += double{value} * double{value};
    rest += left * left;
  }
  return make_float2(static_cast<float>(sqrt(sum_of_warp(norm))), static_cast<float>(sqrt(sum_of_warp(rest))));
}

/// squared_distance() of compute/kmeans.cpp by eight lanes: all get the result.
__device__ __forceinline__ double squared_distance(const float* x, const float* y, int dim) {
  const int lane = static_cast<int>(threadIdx.x % 8);
  double own = 0.0;
#pragma unroll 8
  for (int j = lane; j < dim; j += 8) {
    const double e = double{x[j]} - double{y[j]};
    own = __dadd_rn(own, __dmul_rn(e, e));
  }
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __dadd_rn(sum, __shfl_sync(kAll, own, i, 8));
  return sum;
}

struct RowOfRun {
  int run;
  const float* x;
  const float* centroids;
};
__device__ __forceinline__ RowOfRun row_of(const Clustering& c, std::int64_t row, int from) {
  const int run = static_cast<int>(row / c.count), set = run / c.runs_of_set;
  return {run, c.rows + (set * c.count + row % c.count) * c.dim,
          c.centroids[from] + std::int64_t{run} * c.clusters * c.dim};
}

inline unsigned blocks_of(std::int64_t count, std::int64_t size) {
  return static_cast<unsigned>((count + size - 1) / size);
}

}  // namespace kvq::cuda
