#pragma once

#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/stages.cuh>

namespace kvq::decode {

/// The online softmax of a consumer warp with 8 or 16 rows (many_rows.cuh).
template <typename T>
struct ManyRowsState {
  using VSide = typename T::VSide;
  static constexpr int kBlocks = T::kRowBlocks;

  /// Weights are at most 2^kTop when the reference follows them.
  static constexpr float kTop = 12.0f;
  /// The reference without a score. Finite, so that the weight of a hidden token is 0.
  static constexpr float kNone = -0x1.fffffep127f;

  /// A number for each of this lane's rows: two of each row block.
  using PerRow = float[kBlocks][2];
  /// Of each row block, [2 i + e]: of token or channel g + 8 i and row 2 t + e.
  using Fragment = float[kBlocks][4];

  float out[T::kChannelBlocks][kBlocks][4];  ///< [2 i + e] of channel g + 8 i and row 2 t + e; codes' unit: unit_of()
  PerRow reference;                          ///< of the exponentials, in base 2: about kTop below the largest weight
  PerRow sum;                                ///< this lane's tokens only
  /// What the products with codes leave out. Affine: sum of p m; symmetric: sum of p s. This lane's tokens only.
  float offsets[VSide::kGroups][kBlocks][2];
  bool settled;  ///< all rows have a reference

  /// What 1 in `out` stands for.
  static __device__ constexpr float unit_of(int block) {
    return T::kExact ? 0x1p24f : 0x1p24f / static_cast<float>(1 << (block % VSide::kPerByte * VSide::kBits));
  }
  /// Begins a work tile.
  __device__ __forceinline__ void begin(const typename T::Operand&, int) {
#pragma unroll
    for (auto& block : out)
#pragma unroll
      for (auto& rows : block) rows[0] = rows[1] = rows[2] = rows[3] = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        reference[b][e] = kNone, sum[b][e] = 0.0f;
#pragma unroll
        for (auto& group : offsets) group[b][e] = 0.0f;
      }
    settled = false;
  }
  /// Makes the results of all rows NaN.
  __device__ __forceinline__ void poison() {
#pragma unroll
    for (auto& rows : sum) rows[0] = rows[1] = kNaN;
  }

  /// Moves the references so that weights of base-2 size `largest` are at most 2^kTop, and rescales the sums.
  /// @param largest  of this lane's tokens
  __device__ __forceinline__ void follow(PerRow& largest) {
    bool all = true;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float most = largest[b][e];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
        const float moved = fmaxf(reference[b][e], most - kTop);
        const float factor = moved > reference[b][e] ? ptx::ex2(reference[b][e] - moved) : 1.0f;
        reference[b][e] = moved;
        sum[b][e] *= factor;
#pragma unroll
        for (auto& group : offsets) group[b][e] *= factor;
#pragma unroll
        for (auto& block : out) block[b][e] *= factor, block[b][2 + e] *= factor;
        all = all && moved > kNone;
      }
    settled = __all_sync(kAll, all);
  }

  /// Sums over lanes, and adds the term that the products left out: of the minima (affine), or of the middle of the
  /// codes (symmetric). Afterwards values and sums are relative to a reference that is kTop higher.
  __device__ __forceinline__ void finish() {
    constexpr float kScale = 1.0f / (1 << static_cast<int>(kTop));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[b][e] += __shfl_xor_sync(kAll, sum[b][e], step);
        sum[b][e] *= kScale;
        reference[b][e] = reference[b][e] > kNone ? reference[b][e] + kTop : kMinusInf;
        if constexpr (!T::kExact)
#pragma unroll
          for (auto& group : offsets) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) group[b][e] += __shfl_xor_sync(kAll, group[b][e], step);
            group[b][e] *= kScale * (VSide::kAffine ? 1.0f : -0.5f * VSide::kLevels);
          }
      }
#pragma unroll
    for (int block = 0; block < T::kChannelBlocks; ++block)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float offset = 0.0f;
          if constexpr (!T::kExact) offset = offsets[value_step(VSide::side(), block) / VSide::kStepsInGroup][b][i % 2];
          out[block][b][i] = fmaf(out[block][b][i], kScale * unit_of(block), offset);
        }
  }
  /// Calls f(row in the row block, permuted channel, value, which is not divided by the softmax sum) for all values of
  /// this lane and row block.
  template <typename F>
  __device__ __forceinline__ void for_each_value(int row_block, int lane, F f) const {
#pragma unroll
    for (int block = 0; block < T::kChannelBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        f(2 * (lane & 3) + i % 2, 16 * block + 8 * (i / 2) + (lane >> 2), out[block][row_block][i]);
  }
  /// Calls f(row, state) for the rows of each lane with lane / 4 = 0, after finish().
  template <typename F>
  __device__ __forceinline__ void for_each_state(int lane, F f) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) f(8 * b + 2 * (lane & 3) + e, SoftmaxState{reference[b][e], sum[b][e]});
  }
};

}  // namespace kvq::decode
