#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/runtime/kernels/common/quantize/clip.cuh>
#include <kvq/runtime/kernels/common/quantize/encode.cuh>

/// Quantizes rows that this kernel rotated. Their x_rot has a rounding error, so packing.md allows either code if the
/// quotient lies within that error of an edge. This takes far fewer operations a channel than the codec's division;
/// scales and minima are rounded just as in encode().
///
/// A code is the integer part of q = x a + b. One fused multiply-add, rounded down, leaves q 2^f in the mantissa of a
/// float, with the code in bits f and above and the fraction below, and __byte_perm() picks the bytes with the codes.
/// The error of q is below 2^-f, besides the rounding of a. If rows are clipped, or codes saturate, q / 2^bits is
/// computed first, with saturation to [0, 1].
namespace kvq::write {

constexpr float kFixed = 8388608.0f;  ///< 2^23: the last bit of the mantissa counts 1

/// Byte 2 of each word.
__device__ __forceinline__ unsigned bytes_2(unsigned a, unsigned b, unsigned c, unsigned d) {
  return __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

/// Fraction bits f of a slice, chosen so that its codes lie in the right bits of byte 2.
template <int kBits>
__host__ __device__ constexpr int fraction_bits(int slice) {
  return kBits == 4 ? 16 : slice % 2 == 0 ? 20 : 18;
}

/// Channels of a slice of a word of the lane's codes: byte i has channel 32 step + 8 t + 4 half + i.
struct CodeSource {
  int step = 0, half = 0;
};
template <typename Side>
__host__ __device__ constexpr CodeSource code_source(int word, int slice) {
  constexpr int kPaired = Side::kWords / 2;
  if (word < 2 * kPaired) return {word / 2 * Side::kPerByte + slice, word % 2};
  return {kPaired * Side::kPerByte + slice / 2, slice % 2};
}

/// Mask of the bits of a word that belong to a group.
template <typename Side>
__host__ __device__ constexpr unsigned group_bits(int word, int group) {
  unsigned bits = 0;
  for (int slice = 0; slice < Side::kPerByte; ++slice)
    if (code_source<Side>(word, slice).step / Side::kStepsInGroup == group)
      bits |= Side::kMask << (slice * Side::kBits);
  return bits;
}

/// Sum of l(c)^2 over one lane's channels of a group, from its words; see packing.md (b).
template <typename Side>
__device__ __forceinline__ int sum_of_squared_levels(const unsigned (&words)[Side::kWords], int group) {
  constexpr int kChannels = Side::kGroup / 4;  // of the group in one lane
  if constexpr (Side::kBits == 2) {            // levels are 1 where a code's bits differ, else 3
    int inner = 0;
#pragma unroll
    for (int w = 0; w < Side::kWords; ++w)
      inner += __popc((words[w] ^ (words[w] >> 1)) & 0x55555555u & group_bits<Side>(w, group));
    return 9 * kChannels - 8 * inner;
  } else {
    unsigned squares = 0, sum = 0;
#pragma unroll
    for (int w = 0; w < Side::kWords; ++w) {
      const unsigned own = words[w] & group_bits<Side>(w, group), low = own & 0x0F0F0F0Fu,
                     high = (own >> 4) & 0x0F0F0F0Fu;
      squares = __dp4a(low, low, __dp4a(high, high, squares));
      sum = __dp4a(low, 0x01010101u, __dp4a(high, 0x01010101u, sum));
    }
    return static_cast<int>(4 * squares - 60 * sum) + 225 * kChannels;
  }
}

/// Quantizes the channels of one word, from q = x a + b. q must lie in [0, 2^bits), or is clamped to it if kSaturate.
template <typename Side, bool kSaturate>
__device__ __forceinline__ unsigned quantize_word(const float (&x)[Side::kHeadDim / 32][8], int word, const float* a,
                                                  const float* b) {
  constexpr int kBits = Side::kBits;
  const auto fixed = [&](int slice, int byte) {
    const CodeSource from = code_source<Side>(word, slice);
    const int group = from.step / Side::kStepsInGroup, fraction = fraction_bits<kBits>(slice);
    const float value = x[from.step][4 * from.half + byte];
    const float one = static_cast<float>(1 << fraction), all = static_cast<float>((1 << (fraction + kBits)) - 1);
    if constexpr (kSaturate) {
      // Rounded up, so that this factor moves no channel below its edge.
      const float ratio = one / all * (1.0f + 0x1p-23f);
      const float share = __saturatef(fmaf(value, a[group] * ratio, b[group] * ratio));
      return __float_as_uint(__fmaf_rd(share, all, kFixed));
    } else {
      return __float_as_uint(__fmaf_rd(value, a[group] * one, fmaf(b[group], one, kFixed)));
    }
  };
  if constexpr (kBits == 4) {
    const unsigned low = bytes_2(fixed(0, 0), fixed(0, 1), fixed(0, 2), fixed(0, 3));
    return low + (bytes_2(fixed(1, 0), fixed(1, 1), fixed(1, 2), fixed(1, 3)) << 4);
  } else {
    // Slices 1 and 2 lie in bits 2..5 of each byte, where they stay. Slices 3 and 0 lie there, too, and are then
    // rotated by 4 bits: slice 3 to bits 6 and 7 of its byte, slice 0 to the lowest bits of the next byte.
    unsigned inner[4], outer[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      inner[i] = ptx::lop3_select(3u << 18, fixed(1, i), fixed(2, i));
      outer[i] = ptx::lop3_select(3u << 18, fixed(3, i), fixed(0, (i + 1) % 4));
    }
    const unsigned outer_bytes = bytes_2(outer[0], outer[1], outer[2], outer[3]);
    return ptx::lop3_select(0x3C3C3C3Cu, bytes_2(inner[0], inner[1], inner[2], inner[3]),
                            __funnelshift_l(outer_bytes, outer_bytes, 4));
  }
}

/// Quantizes one row to affine codes, like encode(). @param low, high  [G] extremes of the groups, clipped, times
/// row_scale
/// @return  false if the row is out of the ordinary, as are rows that are not finite, and must go to encode(); the same
/// in all lanes of the row
template <typename Side, bool kSaturate>
__device__ __forceinline__ bool encode_affine_row(const float (&x)[Side::kHeadDim / 32][8], float row_scale,
                                                  const float (&low)[Side::kGroups], const float (&high)[Side::kGroups],
                                                  unsigned (&words)[Side::kWords],
                                                  unsigned (&group_params)[Side::kGroups]) {
  constexpr float kLevels = Side::kLevels;
  bool ordinary = true;
  float a[Side::kGroups], b[Side::kGroups];
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    unsigned short scale_bits, minimum_bits;
    const float range = fminf(__fsub_rn(high[group], low[group]), 3.40282347e38f);
    const float step = stored<Side::kBfloat>(divide(range, kLevels, 1.0f / kLevels), scale_bits);
    const float minimum = stored<Side::kBfloat>(low[group], minimum_bits);
    if (minimum == 0.0f) minimum_bits = 0;
    group_params[group] = scale_bits | static_cast<unsigned>(minimum_bits) << 16;
    const float reciprocal = ptx::rcp_approx(step);
    a[group] = row_scale * reciprocal, b[group] = fmaf(-minimum, reciprocal, 0.5f);
    // Ordinary: the extremes get the outermost codes with a margin, and q is small enough for the fixed point.
    const float first = fmaf(low[group], reciprocal, b[group]), last = fmaf(high[group], reciprocal, b[group]);
    ordinary = ordinary && first > 0.25f && first < 0.75f && last > kLevels + 0.25f && last < kLevels + 0.75f &&
               fabsf(b[group]) < 64.0f;
  }
#pragma unroll
  for (int w = 0; w < Side::kWords; ++w) words[w] = quantize_word<Side, kSaturate>(x, w, a, b);
  return ordinary;
}

/// Quantizes both rows to symmetric codes by the rule `norm`.
/// @param ordinary  becomes false for rows that must go to encode()
template <typename Side>
__device__ __forceinline__ void encode_norm_rows(const Rows<Side>& rows, unsigned (&words)[2][Side::kWords],
                                                 unsigned (&group_params)[2][Side::kGroups], bool (&ordinary)[2]) {
  constexpr int kGroupSteps = Side::kStepsInGroup;
  float energy[2][Side::kGroups];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float a[Side::kGroups], b[Side::kGroups];
#pragma unroll
    for (int group = 0; group < Side::kGroups; ++group) {
      float sum[2] = {};
#pragma unroll
      for (int j = group * kGroupSteps; j < (group + 1) * kGroupSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e % 2] = fmaf(rows.x[r][j][e], rows.x[r][j][e], sum[e % 2]);
      float& all = energy[r][group];
      all = sum[0] + sum[1];
      all += __shfl_xor_sync(kAll, all, 1);
      all += __shfl_xor_sync(kAll, all, 2);
      unsigned short bits;
      const float step = stored<Side::kBfloat>(
          kGaussianStep<Side::kBits> * rows.row_scale * ptx::sqrt_approx(all * (1.0f / Side::kGroup)), bits);
      // Edges belong to the code above, and 0 lies on an edge, as do other numbers if rows have few digits. So b is
      // raised by the rounding error of a.
      a[group] = rows.row_scale * ptx::rcp_approx(step);
      b[group] = static_cast<float>(1 << (Side::kBits - 1)) * (1.0f + 0x1p-22f);
      // If the sum is very large, very small or NaN, so is the step, or it is negative.
      ordinary[r] = ordinary[r] && step > 0x1p-12f && step < 0x1p14f;
    }
#pragma unroll
    for (int w = 0; w < Side::kWords; ++w) words[r][w] = quantize_word<Side, true>(rows.x[r], w, a, b);
  }
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    static_assert(Side::kGroup * (Side::kLevels * Side::kLevels) < 1 << 16);
    const int first = sum_of_squared_levels<Side>(words[0], group),
              second = sum_of_squared_levels<Side>(words[1], group);
    unsigned squares = static_cast<unsigned>(first) | static_cast<unsigned>(second) << 16;
    squares += __shfl_xor_sync(kAll, squares, 1);
    squares += __shfl_xor_sync(kAll, squares, 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto own = static_cast<float>(r == 0 ? squares & 0xFFFFu : squares >> 16);
      unsigned short bits;
      stored<Side::kBfloat>(2.0f * rows.row_scale * ptx::sqrt_approx(energy[r][group] * ptx::rcp_approx(own)), bits);
      group_params[r][group] = bits;
    }
  }
}

/// Smallest and largest channel of each group of a row, by comparing bits as integers: as an unsigned integer, the
/// smallest negative float is the largest. Infinities and NaNs are beyond all finite floats of their sign.
/// @return  false if a group does not have channels of both signs, or if a channel is not finite
template <typename Side>
__device__ __forceinline__ bool group_extremes(const float (&x)[Side::kHeadDim / 32][8], float (&low)[Side::kGroups],
                                               float (&high)[Side::kGroups]) {
  constexpr int kGroupSteps = Side::kStepsInGroup;
  constexpr unsigned kInfinity = 0x7F800000u, kSign = 0x80000000u;
  bool plain = true;
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    unsigned least = 0;
    int most = -1;
#pragma unroll
    for (int j = group * kGroupSteps; j < (group + 1) * kGroupSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e)
        least = max(least, __float_as_uint(x[j][e])), most = max(most, __float_as_int(x[j][e]));
    least = max(least, __shfl_xor_sync(kAll, least, 1)), most = max(most, __shfl_xor_sync(kAll, most, 1));
    least = max(least, __shfl_xor_sync(kAll, least, 2)), most = max(most, __shfl_xor_sync(kAll, most, 2));
    low[group] = __uint_as_float(least), high[group] = __int_as_float(most);
    plain = plain && least - kSign < kInfinity && static_cast<unsigned>(most) < kInfinity;
  }
  return plain;
}

__device__ __forceinline__ void swap(unsigned& a, unsigned& b) {
  const unsigned c = a;
  a = b, b = c;
}

/// Quantizes one warp's rows, clipped first if `clip_rank` is set.
template <typename Side>
__device__ __forceinline__ void encode_rows(Rows<Side>& rows, ScaleRule rule, unsigned (&words)[2][Side::kWords],
                                            unsigned (&group_params)[2][Side::kGroups]) {
  constexpr int kSteps = Rows<Side>::kSteps;
  float threshold[2] = {};
  bool ordinary[2] = {rows.rotated, rows.rotated};  // for each row; the same in all lanes of the row
  if constexpr (Side::kAffine) {
    float low[2][Side::kGroups], high[2][Side::kGroups];
    if (rows.rotated || rows.clip_rank > 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) ordinary[r] &= group_extremes<Side>(rows.x[r], low[r], high[r]);
    }
    if (rows.clip_rank > 0) {
      float most[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int group = 0; group < Side::kGroups; ++group)
          most[r] = fmaxf(most[r], fmaxf(fabsf(low[r][group]), fabsf(high[r][group])));
      clip_thresholds<kSteps>(rows.x, rows.clip_rank, most, threshold);
#pragma unroll
      for (int r = 0; r < 2; ++r) ordinary[r] &= is_finite(most[r] * rows.row_scale);
    }
    if (rows.rotated) {
      if (rows.clip_rank > 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int group = 0; group < Side::kGroups; ++group)
            low[r][group] = fmaxf(low[r][group], -threshold[r]) * rows.row_scale,
            high[r][group] = fminf(high[r][group], threshold[r]) * rows.row_scale;
          ordinary[r] &=
              encode_affine_row<Side, true>(rows.x[r], rows.row_scale, low[r], high[r], words[r], group_params[r]);
        }
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int group = 0; group < Side::kGroups; ++group)
            low[r][group] *= rows.row_scale, high[r][group] *= rows.row_scale;
          ordinary[r] &=
              encode_affine_row<Side, false>(rows.x[r], rows.row_scale, low[r], high[r], words[r], group_params[r]);
        }
      }
    }
  } else {
    if (rows.rotated && rule == ScaleRule::norm) {
      encode_norm_rows<Side>(rows, words, group_params, ordinary);
    } else {
      ordinary[0] = ordinary[1] = false;
    }
  }
  if (__all_sync(kAll, ordinary[0] && ordinary[1])) return;

  if (rows.row_scale != 1.0f) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      threshold[r] *= rows.row_scale;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) rows.x[r][j][e] *= rows.row_scale;
    }
  }
  const bool finite[2] = {is_finite_row(rows.x[0]), is_finite_row(rows.x[1])};  // the clip hides infinities
  if (rows.clip_rank > 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) rows.x[r][j][e] = fminf(fmaxf(rows.x[r][j][e], -threshold[r]), threshold[r]);
  }
  // The slow path, for rows that are not ordinary. Not unrolled, because the code must stay in the instruction cache.
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < Side::kWords; ++i) swap(words[0][i], words[1][i]);
#pragma unroll
    for (int i = 0; i < Side::kGroups; ++i) swap(group_params[0][i], group_params[1][i]);
    unsigned own_words[Side::kWords], own_group_params[Side::kGroups];
    encode<Side>(rows.x[0], rule, own_words, own_group_params);
    if (!(r == 0 ? finite[0] : finite[1])) poison<Side>(own_words, own_group_params);
    const bool keep = r == 0 ? ordinary[0] : ordinary[1];
#pragma unroll
    for (int i = 0; i < Side::kWords; ++i) words[1][i] = keep ? words[1][i] : own_words[i];
#pragma unroll
    for (int i = 0; i < Side::kGroups; ++i) group_params[1][i] = keep ? group_params[1][i] : own_group_params[i];
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.x[0][j][e] = rows.x[1][j][e];
  }
}

}  // namespace kvq::write
