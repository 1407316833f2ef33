#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/runtime/kernels/common/quantize/rows.cuh>

/// Quantizes rows to codes, scales and minima (`group_params`), bit for bit as packing.md says.
namespace kvq::write {

/// x / s rounded correctly, given r = 1 / s rounded correctly (Markstein). Quotients here are far from overflow; if one
/// is so small that the remainder underflows, its code is 0 in any case.
__device__ __forceinline__ float divide(float x, float s, float r) {
  const float q = x * r;
  return fmaf(fmaf(-q, s, x), r, q);
}

/// step[b] of packing.md (b).
template <int kBits>
constexpr float kGaussianStep = kBits == 2 ? 0.9956867f : 0.3352006f;

/// Sum over the group in the order of packing.md, neighbors first: eight channels of a lane, the four lanes, the steps.
/// @param terms  (step of the row, array of the terms of the lane's eight channels)
template <typename Side, typename Terms>
__device__ __forceinline__ float tree_sum_of_steps(int group, Terms terms) {
  constexpr int kGroupSteps = Side::kStepsInGroup;
  float steps[kGroupSteps];
#pragma unroll
  for (int j = 0; j < kGroupSteps; ++j) {
    float y[8];
    terms(group * kGroupSteps + j, y);
    float sum = kvq::tree_sum(y);
    sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, 1));
    steps[j] = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, 2));
  }
  // A group of 3 or 6 steps is padded with zeros to a power of two.
#pragma unroll
  for (int width = 1; width < kGroupSteps; width *= 2)
#pragma unroll
    for (int j = 0; j < kGroupSteps; j += 2 * width)
      if (j + width < kGroupSteps) steps[j] = __fadd_rn(steps[j], steps[j + width]);
  return steps[0];
}
/// @param term  (step of the row, channel of the lane's eight)
template <typename Side, typename Term>
__device__ __forceinline__ float tree_sum(int group, Term term) {
  return tree_sum_of_steps<Side>(group, [&](int j, float(&y)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) y[e] = term(j, e);
  });
}

/// Whether all channels of a row are finite. All lanes of the warp call it.
template <int kSteps>
__device__ __forceinline__ bool is_finite_row(const float (&x)[kSteps][8]) {
  // If a channel is not finite, nor is the sum of the products of neighbors. It may also overflow.
  float products = 0.0f;
#pragma unroll
  for (int j = 0; j < kSteps; ++j)
#pragma unroll
    for (int e = 0; e < 8; e += 2) products = fmaf(x[j][e], x[j][e + 1], products);
  if (__all_sync(kAll, is_finite(products))) return true;
  unsigned most = 0;
#pragma unroll
  for (int j = 0; j < kSteps; ++j)
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[j][e]) & 0x7FFFFFFFu);
  most = max(most, __shfl_xor_sync(kAll, most, 1));
  most = max(most, __shfl_xor_sync(kAll, most, 2));
  return most < 0x7F800000u;
}

/// Codes and group parameters of a row that is not finite.
template <typename Side>
__device__ __forceinline__ void poison(unsigned (&words)[Side::kWords], unsigned (&group_params)[Side::kGroups]) {
  constexpr unsigned kQuietNaN = Side::kBfloat ? 0x7FC0u : 0x7E00u;
#pragma unroll
  for (unsigned& word : words) word = 0;
#pragma unroll
  for (unsigned& params : group_params) params = Side::kAffine ? kQuietNaN * 0x10001u : kQuietNaN;
}

/// Quantizes one token's row, which is finite; codes of others mean nothing. @param words  the lane's codes  @param
/// group_params  bits of scale (and minimum) of each group
template <typename Side>
__device__ __forceinline__ void encode(const float (&x)[Side::kHeadDim / 32][8], ScaleRule rule,
                                       unsigned (&words)[Side::kWords], unsigned (&group_params)[Side::kGroups]) {
  constexpr int kGroupSteps = Side::kStepsInGroup, kLevels = (1 << Side::kBits) - 1;
  constexpr float kMost = 3.40282347e38f;
#pragma unroll
  for (unsigned& w : words) w = 0;
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    float step = 0.0f, minimum = 0.0f;
    unsigned short scale_bits = 0, minimum_bits = 0;
    float energy = 0.0f;
    if constexpr (Side::kAffine) {
      float low = x[group * kGroupSteps][0], high = low;
#pragma unroll
      for (int j = group * kGroupSteps; j < (group + 1) * kGroupSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) low = fminf(low, x[j][e]), high = fmaxf(high, x[j][e]);
      low = fminf(low, __shfl_xor_sync(kAll, low, 1)), high = fmaxf(high, __shfl_xor_sync(kAll, high, 1));
      low = fminf(low, __shfl_xor_sync(kAll, low, 2)), high = fmaxf(high, __shfl_xor_sync(kAll, high, 2));
      step =
          stored<Side::kBfloat>(__fdiv_rn(fminf(__fsub_rn(high, low), kMost), static_cast<float>(kLevels)), scale_bits);
      minimum = stored<Side::kBfloat>(low, minimum_bits);
      if (step == 0.0f) scale_bits = 0;
      if (minimum == 0.0f) minimum_bits = 0;
    } else {
      if (rule == ScaleRule::absmax) {
        float most = 0.0f;
#pragma unroll
        for (int j = group * kGroupSteps; j < (group + 1) * kGroupSteps; ++j)
#pragma unroll
          for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(x[j][e]));
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
        step = stored<Side::kBfloat>(__fdiv_rn(__fmul_rn(2.0f, most), static_cast<float>(kLevels)), scale_bits);
      } else {
        energy = tree_sum<Side>(group, [&](int j, int e) { return __fmul_rn(x[j][e], x[j][e]); });
        step = stored<Side::kBfloat>(
            __fmul_rn(kGaussianStep<Side::kBits>, __fsqrt_rn(__fdiv_rn(energy, static_cast<float>(Side::kGroup)))),
            scale_bits);
      }
    }
    // Codes are rounded down in the low bits of a float, after the clamp, which commutes with rounding down. A group
    // whose step is 0 has quotients 0, or for affine codes 0.5.
    // Subnormal steps (of bfloat16) and what they divide are scaled up, exactly.
    const float factor = Side::kBfloat && step < 0x1p-100f ? 0x1p60f : 1.0f, divisor = step * factor;
    const float reciprocal = step > 0.0f ? __frcp_rn(divisor) : 0.0f;
    constexpr float kHalf = static_cast<float>(1 << (Side::kBits - 1)), kMagic = 12582912.0f;
    float squares = 0.0f, levels[kGroupSteps][8];
#pragma unroll
    for (int j = 0; j < kGroupSteps; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        unsigned bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = x[group * kGroupSteps + j][4 * w + i];
          float code;
          if constexpr (Side::kAffine) {
            const float above = __fsub_rn(value, minimum);
            const float quotient = __fadd_rn(divide(above * factor, divisor, reciprocal), 0.5f);
            // If `above` is infinite, the quotient is NaN; fminf() first, because it drops the NaN.
            code = __fadd_rd(fmaxf(fminf(quotient, static_cast<float>(kLevels)), 0.0f), kMagic);
          } else {
            const float quotient = divide(value * factor, divisor, reciprocal);
            code = __fadd_rd(fminf(fmaxf(quotient, -kHalf), kHalf - 1.0f), kMagic + kHalf);
            const float level = fmaf(2.0f, code - kMagic, -static_cast<float>(kLevels));
            squares = fmaf(level, level, squares);
            levels[j][4 * w + i] = level;
          }
          bits[i] = __float_as_uint(code);
        }
        const CodePlace position = code_place(Side::side(), 32 * (group * kGroupSteps + j) + 4 * w);
        const unsigned four =
            __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
        words[position.byte / 4] |= four << (position.slice * Side::kBits);
      }
    if constexpr (!Side::kAffine) {
      squares += __shfl_xor_sync(kAll, squares, 1);
      squares += __shfl_xor_sync(kAll, squares, 2);
      const float n = squares;
      if (step > 0.0f && rule == ScaleRule::norm) {
        stored<Side::kBfloat>(__fsqrt_rn(__fdiv_rn(__fmul_rn(4.0f, energy), n)), scale_bits);
      } else if (rule == ScaleRule::least_squares) {
        const float dot =
            tree_sum<Side>(group, [&](int j, int e) { return __fmul_rn(x[j][e], levels[j % kGroupSteps][e]); });
        if (step > 0.0f) stored<Side::kBfloat>(__fdiv_rn(__fmul_rn(2.0f, dot), n), scale_bits);
      }
      if (step == 0.0f) scale_bits = 0;
    }
    group_params[group] = scale_bits | static_cast<unsigned>(minimum_bits) << 16;
  }
}

}  // namespace kvq::write
