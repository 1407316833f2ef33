#pragma once

#include <kvq/runtime/kernels/common/rotation.h>
#include <kvq/runtime/kernels/common/generic_tiles.cuh>

/// Rotations of rows in shared memory by a block of kThreads. Each function begins and ends with a barrier.
namespace kvq::generic {

/// Normalized Hadamard blocks of rows [n, dim], `stride` floats apart, in place. @param order  a power of two
__device__ __forceinline__ void transform_blocks(float* rows, int n, int dim, int stride, int order) {
  const int thread = static_cast<int>(threadIdx.x), pairs = dim / 2;
  __syncthreads();
  for (int half = 1; half < order; half *= 2) {
    for (int i = thread; i < n * pairs; i += kThreads) {
      const int x = i % pairs;
      float* at = rows + i / pairs * stride + (x & ~(half - 1)) * 2 + (x & (half - 1));
      const float a = at[0], b = at[half];
      at[0] = a + b, at[half] = a - b;
    }
    __syncthreads();
  }
  const float norm = __frcp_rn(__fsqrt_rn(static_cast<float>(order)));
  for (int i = thread; i < n * dim; i += kThreads) rows[i / dim * stride + i % dim] *= norm;
  __syncthreads();
}

/// Channels of rows [n, dim], `stride` floats apart, times a factor each. @param factor_of  channel -> float
template <typename FactorOf>
__device__ __forceinline__ void multiply_channels(float* rows, int n, int dim, int stride, FactorOf factor_of) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n * dim; i += kThreads)
    rows[i / dim * stride + i % dim] *= factor_of(i % dim);
  __syncthreads();
}

/// Rows [kRows, dim] times a matrix [dim, dim] of float, in place.
/// @param element  (row, column) of the matrix -> float
template <int kRows, typename Element>
__device__ __forceinline__ void multiply_matrix(float* rows, int dim, int stride, Element element) {
  constexpr int kColumns = kGenericHeadDim / kThreads;  ///< most columns of a thread
  float sums[kColumns][kRows] = {};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = static_cast<int>(threadIdx.x) + i * kThreads;
    if (column >= dim) continue;
#pragma unroll 4
    for (int k = 0; k < dim; ++k) {
      const float m = element(k, column);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[i][r] = fmaf(rows[r * stride + k], m, sums[i][r]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = static_cast<int>(threadIdx.x) + i * kThreads;
    if (column >= dim) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r * stride + column] = sums[i][r];
  }
  __syncthreads();
}

/// Rotates query rows into the basis of the keys, or (`back`) result rows from the basis of the values to the model's.
template <int kRows>
__device__ __forceinline__ void rotate_rows(float* rows, int dim, int stride, const DeviceRotation& rotation, int head,
                                            bool back) {
  const int entry = rotation.per_head ? head : 0;
  if (rotation.matrix) {
    const float* matrix = rotation.matrix + static_cast<std::int64_t>(entry) * dim * dim;
    multiply_matrix<kRows>(rows, dim, stride, [&](int k, int column) { return __ldg(matrix + k * dim + column); });
  } else if (rotation.order >= 1) {
    const bool any = rotation.factors || rotation.signs;
    const auto factor_of = [&](int c) {
      return rotation.factors ? rotation.factors[entry * dim + c] : static_cast<float>(rotation.signs[entry * dim + c]);
    };
    if (any && !back) multiply_channels(rows, kRows, dim, stride, factor_of);
    transform_blocks(rows, kRows, dim, stride, rotation.order);
    if (any && back) multiply_channels(rows, kRows, dim, stride, factor_of);
  } else {
    __syncthreads();
  }
}

}  // namespace kvq::generic
