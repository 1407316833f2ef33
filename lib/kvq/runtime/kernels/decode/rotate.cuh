#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/policy.h>
#include <kvq/runtime/kernels/decode/rotation_layout.h>
#include <kvq/runtime/kernels/common/lane_row.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>

/// Rotations of a few rows: of queries before decode, of results after it. A whole block applies a dense rotation; for
/// other rotations one warp rotates one row.
namespace kvq::decode {

constexpr int kRotateThreads = 256;  ///< of a block of the queries or of the combine kernel
constexpr int kRotateWarps = kRotateThreads / 32;
template <typename T>
constexpr int kRotateRegisters = decode_policy(T::kHeadDim, 4).rotate_registers;

/// Rows in shared memory, padded so that reading the eight rows of a fragment has no bank conflicts.
template <int kDim>
using PaddedRow = float[kDim + 16];

/// x and y as sums of two bfloat16 numbers each: `high` is rounded, `low` is the rounding error.
__device__ __forceinline__ void split_bf16(float x, float y, unsigned& high, unsigned& low) {
  high = ptx::pack_bf16(x, y);
  low = ptx::pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000u));
}

/// Rows times a dense matrix, by tensor cores. Both operands are split into two bfloat16 parts, and the product of the
/// low parts is dropped; the error is below 2^-16 of the sum of the terms' magnitudes.
///
/// A warp takes a column tile of 16 columns at a time (rotation_layout.h), for all row tiles of eight rows. Up to
/// head_dim 128 a warp has at most one column tile:
/// open() starts copying the matrix to shared memory before the rows are ready, and each lane later reads the words
/// that it copied. Above head_dim 128 lanes read the matrix from global memory during the product.
template <int kDim>
struct DenseRotation {
  static constexpr int kSteps = kDim / 16, kColumnTiles = kDim / 16;
  static constexpr int kTurns = (kColumnTiles + kRotateWarps - 1) / kRotateWarps;
  static constexpr bool kHeld = kTurns == 1;
  static_assert(kDim % 32 == 0);
  using Held = uint4[kHeld ? 2 * kSteps : 1][kRotateThreads];  ///< the matrix: high parts, then low parts

  Held& held;
  const std::byte* opened = nullptr;  ///< the open matrix in global memory, at this lane's words

  /// Warps without a column tile read the last one.
  __device__ __forceinline__ const uint4* at(int turn, int step, int part) const {
    constexpr DecodeRotationLayout kLayout{kDim};
    const int warp = static_cast<int>(threadIdx.x) >> 5,
              column_tile = min(warp + turn * kRotateWarps, kColumnTiles - 1);
    return reinterpret_cast<const uint4*>(opened + kLayout.lane_offset(column_tile, step, part, 0));
  }
  /// Makes a head's matrix the current one. Starts its copy to shared memory if `kHeld`, unless it is open already.
  __device__ __forceinline__ void open(const DeviceRotation& rotation, int head) {
    constexpr DecodeRotationLayout kLayout{kDim};
    const std::byte* matrix = rotation.fragments +
                              static_cast<std::int64_t>(rotation.per_head ? head : 0) * kLayout.bytes() +
                              kLayout.lane_offset(0, 0, 0, static_cast<int>(threadIdx.x) & 31);
    if (matrix == opened) return;
    opened = matrix;
#pragma unroll
    for (int i = 0; i < (kHeld ? 2 * kSteps : 0); ++i)
      ptx::cp_async_16(ptx::shared_address(&held[i][threadIdx.x]), at(0, i % kSteps, i / kSteps));
  }
  /// Four words of the matrix for this lane, from shared or from global memory.
  __device__ __forceinline__ uint4 words(int turn, int step, int part) const {
    if constexpr (kHeld)
      return held[part * kSteps + step][threadIdx.x];
    else
      return __ldg(at(turn, step, part));
  }
  /// A lane's accumulators of rotated rows.
  template <int kRowTiles>
  using Product = float[kTurns][kRowTiles][4];

  /// Calls take(row, channel, float2 of that channel and the next one) for all accumulators of the lane.
  template <int kRowTiles, typename Take>
  __device__ __forceinline__ void for_each(const Product<kRowTiles>& product, Take take) const {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (warp + turn * kRotateWarps >= kColumnTiles) break;
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          take(8 * row_tile + 2 * (lane & 3) + i, 16 * (warp + kRotateWarps * turn) + 2 * (lane >> 2),
               make_float2(product[turn][row_tile][i], product[turn][row_tile][2 + i]));
    }
  }
  /// Rows times the matrix, after open(). All threads call it; the warps of the block have different columns.
  /// @param rows  [8 kRowTiles] all rows are read, so unused ones need not be initialized: rows do not mix
  template <int kRowTiles>
  __device__ __forceinline__ void multiply(const PaddedRow<kDim>* rows, Product<kRowTiles>& rotated) const {
    const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
    const int g = lane >> 2, t = lane & 3;
    ptx::cp_async_wait_all();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (warp + turn * kRotateWarps >= kColumnTiles) break;
      constexpr int kAccumulators = kRowTiles == 1 ? 3 : 2;  // independent accumulators, so that products overlap
      float c[kRowTiles][kAccumulators][4] = {};
      // If the matrix is held, a short loop is faster, because its instructions are fetched for the first time. If not,
      // 16 loads are in flight at once, as many as registers allow without spills.
#pragma unroll kHeld ? 2 : 8
      for (int step = 0; step < kSteps; ++step) {
        const uint4 h = words(turn, step, 0), l = words(turn, step, 1);
#pragma unroll
        for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
          const float4 x = *reinterpret_cast<const float4*>(&rows[8 * row_tile + g][16 * step + 4 * t]);
          unsigned high_x[2], low_x[2];
          split_bf16(x.x, x.y, high_x[0], low_x[0]), split_bf16(x.z, x.w, high_x[1], low_x[1]);
          auto& sums = c[row_tile];
          ptx::mma_m16n8k16_bf16(sums[0], h.x, h.y, h.z, h.w, high_x[0], high_x[1]);
          ptx::mma_m16n8k16_bf16(sums[1], l.x, l.y, l.z, l.w, high_x[0], high_x[1]);
          ptx::mma_m16n8k16_bf16(sums[kAccumulators - 1], h.x, h.y, h.z, h.w, low_x[0], low_x[1]);
        }
      }
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          rotated[turn][row_tile][i] =
              c[row_tile][0][i] + (kAccumulators == 3 ? c[row_tile][1][i] + c[row_tile][2][i] : c[row_tile][1][i]);
    }
  }
  /// multiply() in place.
  template <int kRowTiles>
  __device__ __forceinline__ void apply(PaddedRow<kDim>* rows) const {
    Product<kRowTiles> product;
    multiply<kRowTiles>(rows, product);
    __syncthreads();
    for_each<kRowTiles>(
        product, [&](int row, int channel, float2 two) { *reinterpret_cast<float2*>(&rows[row][channel]) = two; });
    __syncthreads();
  }
};

/// The factors of a lane's channels, sign or sign / channel scale: queries are multiplied by them before the Hadamard
/// blocks, results after.
template <int kDim>
__device__ __forceinline__ void load_factors(const DeviceRotation& rotation, int head, int lane,
                                             LaneRow<kDim>& factors) {
  const int first = (rotation.per_head ? head : 0) * kDim + lane;
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) factors[j] = 1.0f;
  if (rotation.factors) {
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) factors[j] = rotation.factors[first + 32 * j];
  } else if (rotation.signs) {
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) factors[j] = static_cast<float>(rotation.signs[first + 32 * j]);
  }
}
template <int kDim>
__device__ __forceinline__ void multiply(LaneRow<kDim>& x, const LaneRow<kDim>& factors) {
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) x[j] *= factors[j];
}

}  // namespace kvq::decode
