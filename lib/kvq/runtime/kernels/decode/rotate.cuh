#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>

/// Rotations of a few rows by a whole block: of queries before decode, of results after it.
namespace kvq::decode {

constexpr int kSideThreads = 256;  ///< of a block that prepares queries or combines results

/// Rows in shared memory, padded so that the eight rows of a fragment lie in different banks.
template <int kDim>
using PaddedRow = float[kDim + 16];

/// Two neighbours as bfloat16, and what that leaves of them.
__device__ __forceinline__ void split(float x, float y, unsigned& high, unsigned& low) {
  high = ptx::pack_bf16(x, y);
  low = ptx::pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000u));
}

/// Rows times a dense matrix, by tensor cores. Numbers of both are taken in two bfloat16 halves and the product of the
/// low ones is dropped, which is right up to 2^-16 of |x| |R|.
///
/// A warp takes 16 columns at a time. They are the rows of its products: lane 4 g + t holds columns 2 g and 2 g + 1, in
/// steps of sixteen rows of R, of which it holds the four from 4 t on. The first steps stay in registers, for head_dim
/// 128 and less all of them, so that they can be read and cut before there are rows.
template <int kDim>
struct DenseRotation {
  static constexpr int kPairs = kDim / 2, kSteps = kDim / 16, kHeld = kSteps <= 8 ? kSteps : kSteps / 2;
  static constexpr int kWarps = kSideThreads / 32, kTurns = (kDim / 16 + kWarps - 1) / kWarps;
  static constexpr bool kStays = kTurns == 1 && kHeld == kSteps;
  static_assert(kDim % 32 == 0 && kSteps % kHeld == 0);

  const float2* opened = nullptr;  ///< this lane's first numbers
  unsigned high[kHeld][4], low[kHeld][4];

  __device__ __forceinline__ int turns() const {  // of this warp
    return (kDim / 16 - static_cast<int>(threadIdx.x) / 32 + kWarps - 1) / kWarps;
  }
  __device__ __forceinline__ void read(int turn, int first_step) {
    float2 m[kHeld][4];
#pragma unroll
    for (int step = 0; step < kHeld; ++step)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        m[step][r] = __ldg(opened + (16 * (first_step + step) + r) * kPairs + turn * kWarps * 8);
#pragma unroll
    for (int step = 0; step < kHeld; ++step)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        split(m[step][r].x, m[step][r + 1].x, high[step][r], low[step][r]);
        split(m[step][r].y, m[step][r + 1].y, high[step][r + 1], low[step][r + 1]);
      }
  }
  /// Reads what stays of a head's matrix, if it is not there yet.
  __device__ __forceinline__ void open(const DeviceRotation& rotation, int head) {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    const float* matrix = rotation.matrix + static_cast<std::int64_t>(rotation.per_head ? head : 0) * kDim * kDim;
    const float2* first = reinterpret_cast<const float2*>(matrix) + 4 * (lane & 3) * kPairs + warp * 8 + (lane >> 2);
    if (kStays && first == opened) return;
    opened = first;
    if (turns() > 0) read(0, 0);
  }
  /// After open().
  /// rows  [8 kTiles], rotated in place. All of them are read; what is in one does not reach another
  template <int kTiles>
  __device__ __forceinline__ void apply(PaddedRow<kDim>* rows) {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    const int g = lane >> 2, t = lane & 3, mine = turns();
    float c[kTurns][kTiles][3][4] = {};  // three products apart, so that they need not wait for each other
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn >= mine) break;
#pragma unroll
      for (int first = 0; first < kSteps; first += kHeld) {
        if (turn + first > 0) read(turn, first);
#pragma unroll
        for (int step = 0; step < kHeld; ++step) {
          const unsigned (&h)[4] = high[step], (&l)[4] = low[step];
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const float4 x = *reinterpret_cast<const float4*>(&rows[8 * tile + g][16 * (first + step) + 4 * t]);
            unsigned high_x[2], low_x[2];
            split(x.x, x.y, high_x[0], low_x[0]), split(x.z, x.w, high_x[1], low_x[1]);
            auto& sums = c[turn][tile];
            ptx::mma_m16n8k16_bf16(sums[0], h[0], h[1], h[2], h[3], high_x[0], high_x[1]);
            ptx::mma_m16n8k16_bf16(sums[1], l[0], l[1], l[2], l[3], high_x[0], high_x[1]);
            ptx::mma_m16n8k16_bf16(sums[2], h[0], h[1], h[2], h[3], low_x[0], low_x[1]);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn >= mine) break;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto& sums = c[turn][tile];
          *reinterpret_cast<float2*>(&rows[8 * tile + 2 * t + i][16 * (warp + kWarps * turn) + 2 * g]) =
              make_float2(sums[0][i] + (sums[1][i] + sums[2][i]), sums[0][2 + i] + (sums[1][2 + i] + sums[2][2 + i]));
        }
    }
    __syncthreads();
  }
};

/// A block Hadamard of n rows in place; `transposed`: the other way.
template <int kDim>
__device__ __forceinline__ void rotate_hadamard(PaddedRow<kDim>* rows, int n, const DeviceRotation& rotation, int head,
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
