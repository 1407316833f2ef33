#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>

/// Rotations of a few rows by a whole block: of queries before decode, of results after it.
namespace kvq::decode {

constexpr int kSideThreads = 256;  ///< of a block that prepares queries or combines results

/// A thread's part of a dense matrix: four columns, and a run of the inner dimension. It stays in registers if it is
/// short, so that it can be read ahead.
template <int kDim>
struct DensePart {
  static constexpr int kQuads = kDim / 4;
  static constexpr int parts() {
    int n = 1;
    while (2 * n * kQuads <= kSideThreads) n *= 2;
    return n;
  }
  static constexpr int kParts = parts(), kEach = kDim / kParts, kBatch = kEach <= 16 ? kEach : 16;
  static constexpr bool kHeld = kBatch == kEach;
  static_assert(kDim % kParts == 0 && kEach % kBatch == 0);

  /// Sums over the parts meet here. The last columns are padding.
  struct Shared {
    float sums[kParts][4][kDim + 4];
  };

  const float4* matrix;
  float4 m[kBatch];

  __device__ __forceinline__ int part() const { return static_cast<int>(threadIdx.x) / kQuads; }
  __device__ __forceinline__ void read(int k) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) m[i] = __ldg(matrix + (k + i) * kQuads);
  }
  __device__ __forceinline__ void open(const DeviceRotation& rotation, int head) {
    matrix = reinterpret_cast<const float4*>(rotation.matrix +
                                             static_cast<std::int64_t>(rotation.per_head ? head : 0) * kDim * kDim) +
             static_cast<int>(threadIdx.x) % kQuads;
    if (kHeld && part() < kParts) read(part() * kEach);
  }
  /// rows  [n, D], rotated in place; a multiple of four rows can be read
  __device__ __forceinline__ void apply(float (*rows)[kDim], int n, Shared& shared) {
    for (int base = 0; base < n; base += 4) {
      if (part() < kParts) {
        float4 sums[4] = {};
#pragma unroll 1
        for (int k = part() * kEach; k < (part() + 1) * kEach; k += kBatch) {
          if (!kHeld) read(k);
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const float x = rows[base + r][k + i];
              sums[r].x = fmaf(x, m[i].x, sums[r].x), sums[r].y = fmaf(x, m[i].y, sums[r].y);
              sums[r].z = fmaf(x, m[i].z, sums[r].z), sums[r].w = fmaf(x, m[i].w, sums[r].w);
            }
        }
        const int column = static_cast<int>(threadIdx.x) % kQuads * 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) *reinterpret_cast<float4*>(&shared.sums[part()][r][column]) = sums[r];
      }
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < 4 * kDim; i += kSideThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) sum += shared.sums[part][i / kDim][i % kDim];
        rows[base + i / kDim][i % kDim] = sum;
      }
      __syncthreads();
    }
  }
};

/// A block Hadamard of rows [n, D] in place; `transposed`: the other way.
template <int kDim>
__device__ __forceinline__ void rotate_hadamard(float (*rows)[kDim], int n, const DeviceRotation& rotation, int head,
                                                bool transposed) {
  const std::int8_t* signs = rotation.signs ? rotation.signs + (rotation.per_head ? head : 0) * kDim : nullptr;
  const int thread = static_cast<int>(threadIdx.x);
  if (signs && !transposed) {
    for (int i = thread; i < n * kDim; i += kSideThreads)
      rows[i / kDim][i % kDim] *= static_cast<float>(signs[i % kDim]);
    __syncthreads();
  }
  for (int half = 1; half < rotation.order; half *= 2) {
    for (int i = thread; i < n * (kDim / 2); i += kSideThreads) {
      const int r = i / (kDim / 2), x = i % (kDim / 2), at = (x & ~(half - 1)) * 2 + (x & (half - 1));
      const float a = rows[r][at], b = rows[r][at + half];
      rows[r][at] = a + b;
      rows[r][at + half] = a - b;
    }
    __syncthreads();
  }
  const float scale = rsqrtf(static_cast<float>(rotation.order));
  for (int i = thread; i < n * kDim; i += kSideThreads)
    rows[i / kDim][i % kDim] *= signs && transposed ? scale * static_cast<float>(signs[i % kDim]) : scale;
  __syncthreads();
}

}  // namespace kvq::decode
