#pragma once

#include <kvq/runtime/kernels/quantize_write/rows.cuh>

#include <cstdint>

/// The threshold of the percentile clip (packing.md, "Clip"): the largest magnitude of a given rank in a row, exactly.
///
/// Magnitudes are first told apart by *levels*: the range below the largest one's next power of two is cut into 256
/// levels of equal size. Levels are counted as pairs of fp16 integers: one saturating addition compares two channels
/// with a level, and a product of tensor cores with ones counts over the row's four lanes. A binary search finds the
/// level that the rank falls into; it mostly holds one or two of the row's channels, and the one in question is the
/// nearest to one of the level's ends. If it holds many, it is cut into levels itself.
namespace kvq::write {

constexpr unsigned kBoth = 0x00010001u;            ///< a number for both halves of a word
constexpr unsigned kFirstLevel = 0x6400u;          ///< fp16 1024; one unit is the last bit
constexpr unsigned kBeforeFirst = 0xE3FFu;         ///< fp16 -1023.5, one bit before -1024
constexpr float kToLevel = 8388608.0f + 25600.0f;  ///< leaves the bits of kFirstLevel + n in a float's lower half

/// How many channels of each row are at the level `key` or above it; key is in both halves and at least 1. All lanes of
/// a row get the row's count.
template <int kPairs>
__device__ __forceinline__ void count_at_least(const unsigned (&levels)[2][kPairs], const unsigned (&key)[2],
                                               float (&count)[2]) {
  constexpr unsigned kOnes = 0x3C003C00u;
  // 1024 + n - (1023 + key) is at least 1 where n >= key, and at most 0 elsewhere. -(1023 + key) has the bits of -1024
  // and key - 1 units.
  float c[2][4] = {};
  const unsigned pivot[2] = {key[0] + kBoth * kBeforeFirst, key[1] + kBoth * kBeforeFirst};
  const auto flags = [&](int r, int i) {
    const __half2 sum =
        __hadd2_sat(*reinterpret_cast<const __half2*>(&levels[r][i]), *reinterpret_cast<const __half2*>(&pivot[r]));
    return *reinterpret_cast<const unsigned*>(&sum);
  };
#pragma unroll
  for (int i = 0; i < kPairs; i += 2)
    ptx::mma_m16n8k16_fp16(c[i / 2 % 2], flags(0, i), flags(1, i), flags(0, i + 1), flags(1, i + 1), kOnes, kOnes);
  count[0] = c[0][0] + c[1][0], count[1] = c[0][2] + c[1][2];
}

/// Largest magnitude of rank `rank` in each of the two rows, 1 being the largest.
/// @param most  each row's largest magnitude
template <int kSteps>
__device__ __forceinline__ void clip_thresholds(const float (&x)[2][kSteps][8], int rank, const float (&most)[2],
                                                float (&threshold)[2]) {
  constexpr int kPairs = 4 * kSteps;
  const float wanted = static_cast<float>(rank);
  // The range: low .. low + 256 size, a power of two. at_low >= rank > above count the channels from `low` and from the
  // range's end on.
  float low[2], at_low[2], above[2];
  unsigned exponent[2];  // of size, biased
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    low[r] = 0.0f, at_low[r] = 32.0f * kSteps, above[r] = 0.0f;
    exponent[r] = max(__float_as_uint(most[r]) >> 23, 8u) - 7u;
  }
  for (int cut = 0;; ++cut) {
    unsigned levels[2][kPairs];
    const auto cut_range = [&](auto level) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float per_size = __uint_as_float((254u - exponent[r]) << 23), start = -low[r] * (per_size * 0x1p-8f);
#pragma unroll
        for (int j = 0; j < kSteps; ++j)
#pragma unroll
          for (int i = 0; i < 8; i += 2)
            levels[r][4 * j + i / 2] =
                __byte_perm(__float_as_uint(level(fabsf(x[r][j][i]), per_size, start)),
                            __float_as_uint(level(fabsf(x[r][j][i + 1]), per_size, start)), 0x5410);
      }
    };
    if (cut == 0)
      cut_range([](float y, float per_size, float) { return __fmaf_rd(y, per_size, kToLevel); });
    else  // of what lies outside, what is above is at level 256, and what is below at level 0, which is not counted
      cut_range([](float y, float per_size, float start) {
        return __fmaf_rd(__saturatef(fmaf(y, per_size * 0x1p-8f, start)), 256.0f, kToLevel);
      });
    unsigned base[2] = {};
#pragma unroll 1
    for (unsigned bit = 128u * kBoth; bit >= kBoth; bit >>= 1) {
      const unsigned key[2] = {base[0] + bit, base[1] + bit};
      float count[2];
      count_at_least(levels, key, count);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool taken = count[r] >= wanted;
        base[r] = taken ? key[r] : base[r];
        at_low[r] = taken ? count[r] : at_low[r];
        above[r] = taken ? above[r] : count[r];
      }
    }
    bool many = false, last = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      low[r] += static_cast<float>(base[r] & 0xFFFFu) * __uint_as_float(exponent[r] << 23);
      many = many || fminf(wanted - above[r], at_low[r] - wanted + 1.0f) > 2.0f;
      last = last || exponent[r] < 9 || (__float_as_uint(low[r]) >> 23) > exponent[r] + 15;
    }
    if (cut == 2 || !__any_sync(kAll, many) || __any_sync(kAll, last)) break;
    exponent[0] -= 8, exponent[1] -= 8;
  }

  // The level holds the ranks above + 1 .. at_low. Go to the one in question from the nearer end: numbers 2 y - 2 end
  // (from the upper end) or 2 end - 1 - 2 y (from the lower one), modulo 2^32, are largest for the magnitude y that is
  // nearest to the end and inside. The factor 2 drops the sign.
  int left[2];  // channels to pass, the last one is the one in question
  unsigned factor[2], offset[2], nearest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float from_above = wanted - above[r], from_below = at_low[r] - wanted + 1.0f;
    const bool down = from_above <= from_below;
    const float end = low[r] + __uint_as_float(exponent[r] << 23);
    left[r] = static_cast<int>(fminf(from_above, from_below));
    factor[r] = down ? 2u : ~1u;
    offset[r] = down ? 0u - 2u * __float_as_uint(end) : 2u * __float_as_uint(low[r]) - 1u;
  }
  for (;;) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned most_near = 0;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) most_near = max(most_near, __float_as_uint(x[r][j][e]) * factor[r] + offset[r]);
      most_near = max(most_near, __shfl_xor_sync(kAll, most_near, 1));
      most_near = max(most_near, __shfl_xor_sync(kAll, most_near, 2));
      nearest[r] = (factor[r] == 2u ? most_near - offset[r] : offset[r] - most_near) >> 1;
    }
    if (!__any_sync(kAll, left[0] > 1 || left[1] > 1)) break;
    // Some row has to go further: past all channels of this magnitude.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int equal = 0;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) equal += (__float_as_uint(x[r][j][e]) & 0x7FFFFFFFu) == nearest[r];
      equal += __shfl_xor_sync(kAll, equal, 1);
      equal += __shfl_xor_sync(kAll, equal, 2);
      // Never fewer than one, so that it ends for rows with NaNs too.
      if (left[r] > 1) {
        left[r] -= max(equal, 1);
        if (left[r] > 0) offset[r] = factor[r] == 2u ? 0u - 2u * nearest[r] : 2u * nearest[r] + 1u;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) threshold[r] = __uint_as_float(nearest[r]);
}

}  // namespace kvq::write
