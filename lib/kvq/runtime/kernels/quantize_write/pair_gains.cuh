#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/common/quantize/encode.cuh>

/// From rotated rows to what the bits of their codes gain: the first kernel of pair_rows.h, behind a rotation.
namespace kvq::write {

/// Rows of 128 two-bit trellis codes with an fp16 scale.
template <int kDim>
struct TrellisSide {
  static constexpr int kHeadDim = kDim, kBits = 2, kGroup = kDim, kGroups = 1, kStepsInGroup = kDim / 32;
  static constexpr bool kExact = false, kAffine = false, kBfloat = false, kTrellis = true;
  static_assert(kDim == kPairHeadDim);
  KVQ_HD static constexpr TileSide side() {
    return {.head_dim = kDim, .bits = 0, .group_size = kDim, .numbers = 1, .row_words = kDim * kBits / 32};
  }
};
template <typename Side>
concept IsTrellis = requires { requires Side::kTrellis; };

/// The tables of a trellis (TrellisGroup::kernel_table()).
struct PairTables {
  const float* values;   ///< [kWindows] by window
  const float* windows;  ///< [kWindows] costs
  const float* taps;     ///< [memory + 1, 2]
  __device__ __forceinline__ PairTables(const RowCode& code, int head, int memory)
      : values(code.tables + __ldg(&code.heads[head].segments[0].table)),
        windows(values + (1 << 2 * (memory + 1))),
        taps(windows + (1 << 2 * (memory + 1))) {}
};

/// t of packing.md (d), from y = x / scale, in the lower half of a word. @param reciprocal  0 if the scale is 0
__device__ __forceinline__ unsigned integer_of(float x, float scale, float reciprocal) {
  constexpr float kMost = kLargestY / 256.0f, kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it is an integer
  const float y = fminf(fmaxf(divide(x, scale, reciprocal), -kMost), kMost);
  return __float_as_uint(fmaf(y, 256.0f, kMagic));
}

/// A gain of both rows, from the sums that packing.md (d) rounds, in halves of a word, times four.
__device__ __forceinline__ unsigned pair_of_gains(int low, int high) {
  return (static_cast<unsigned>((low + 8192) >> 12) & 0xFFFCu) | (static_cast<unsigned>((high + 8192) >> 12) & ~3u)
                                                                     << 16;
}

/// Stores the gains of a lane's channels.
/// @tparam kMemory  at least that of the trellis
/// @param t      integers of both rows, in halves
/// @param gains  of the lane's first channel
template <int kMemory, int kSteps>
__device__ __forceinline__ void store_gains_of(const unsigned (&t)[kSteps][8], const float* all_taps, int memory,
                                               uint2* gains, int lane) {
  int taps[kMemory + 1][2];
#pragma unroll
  for (int k = 0; k <= kMemory; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i) taps[k][i] = k <= memory ? static_cast<int>(__ldg(all_taps + 2 * k + i)) : 0;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    // The first channels behind the lane's are those of the next lane, or of lane 0 in the next step.
    unsigned ahead[8 + kMemory];
#pragma unroll
    for (int e = 0; e < 8; ++e) ahead[e] = t[j][e];
#pragma unroll
    for (int e = 0; e < kMemory; ++e)
      ahead[8 + e] =
          __shfl_sync(kAll, (lane & 3) == 0 ? t[(j + 1) % kSteps][e] : t[j][e], (lane & ~3) | ((lane + 1) & 3));
    int low[8 + kMemory], high[8 + kMemory];
#pragma unroll
    for (int e = 0; e < 8 + kMemory; ++e)
      low[e] = static_cast<short>(ahead[e] & 0xFFFFu), high[e] = static_cast<int>(ahead[e]) >> 16;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int sums[2][2] = {};
#pragma unroll
      for (int k = 0; k <= kMemory; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i][0] += low[e + k] * taps[k][i], sums[i][1] += high[e + k] * taps[k][i];
      gains[(32 * j + e) * PairBlock::kPairs] =
          make_uint2(pair_of_gains(sums[0][0], sums[0][1]), pair_of_gains(sums[1][0], sums[1][1]));
    }
  }
}

/// Computes the gains X of packing.md (d) of a warp's rows. All lanes of the warp call it.
/// @param first_token  of the warp's 16
template <IsTrellis Side>
__device__ __forceinline__ void store_gains(const WriteParams& p, const WriteSide& from, Rows<Side>& rows, bool value,
                                            int head, int first_token, int lane) {
  constexpr int kSteps = Rows<Side>::kSteps;
  const PairRows& pairs = p.pairs;
  const PairBlock layout{pairs.memory};
  const int job = head + (value ? p.num_kv_heads : 0), run = first_token / kTileTokens;
  const int pair = run % 4 * 8 + lane / 4, t = lane & 3;
  std::byte* block = pairs.block(job, first_token / PairBlock::kTokens);
  const PairTables tables(from.code, head, pairs.memory);
  const float gain = __ldg(&from.code.heads[head].segments[0].gain), square = __fmul_rn(gain, gain);

  unsigned y[kSteps][8];  // t of both rows, in halves
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto& x = rows.x[r];
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[j][e] *= rows.row_scale;
    const bool finite = is_finite_row(x);
    const float energy = tree_sum<Side>(0, [&](int j, int e) { return __fmul_rn(x[j][e], x[j][e]); });
    unsigned short bits;
    const float d = stored<Side::kBfloat>(
        __fsqrt_rn(__fdiv_rn(__fdiv_rn(energy, square), static_cast<float>(Side::kHeadDim))), bits);
    const float scale = __fmul_rn(gain, d), reciprocal = scale > 0.0f ? __frcp_rn(scale) : 0.0f;
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const unsigned own = integer_of(x[j][e], scale, reciprocal);
        y[j][e] = r == 0 ? own : __byte_perm(y[j][e], own, 0x5410);
      }
    if (t == 0)
      reinterpret_cast<PairRow*>(block + layout.rows())[PairBlock::token(pair, r)] = {
          energy, finite ? d : __int_as_float(0x7FC00000)};
  }

  auto* gains = reinterpret_cast<uint2*>(block) + pair + 8 * t * PairBlock::kPairs;
  if (pairs.memory < kMostPairMemory)
    store_gains_of<kMostPairMemory - 1>(y, tables.taps, pairs.memory, gains, lane);
  else
    store_gains_of<kMostPairMemory>(y, tables.taps, pairs.memory, gains, lane);
}

}  // namespace kvq::write
