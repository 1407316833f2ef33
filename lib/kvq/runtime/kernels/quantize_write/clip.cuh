#pragma once

#include <kvq/runtime/kernels/quantize_write/rows.cuh>

#include <cstdint>
#include <type_traits>

/// The threshold of the percentile clip (packing.md, "Clip"): the largest magnitude of a given rank in a row, exactly.
///
/// Magnitudes are first told apart by *levels*: the range up to the largest one is cut into about 128 of equal size,
/// and a level is twice its number in a byte, so that a word holds four channels. A search by quarters finds the level
/// that the rank falls into; it mostly holds one or two of the row's channels, and the one in question is the nearest
/// to one of the level's ends.
///
/// A step of the search adds 256 less the level's byte to all bytes of a word at once. Bytes that are not below it run
/// over, and what they hold falls by 256, or 255 if there is a byte above that takes the carry; even bytes never run
/// over because of that. So the sum of all bytes, which a product of tensor cores with ones takes over the row's four
/// lanes, tells how many there are.
namespace kvq::write {

constexpr unsigned kBytes = 0x01010101u;
constexpr int kClipLevels = 128;

/// Sum of the bytes of each row; all lanes of a row get the row's.
template <int kWords>
__device__ __forceinline__ void sum_bytes(const unsigned (&words)[2][kWords], const unsigned (&add)[2], int (&sum)[2]) {
  int c[4] = {};
#pragma unroll
  for (int i = 0; i < kWords; i += 2)
    ptx::mma_m16n8k32_u8u8(c, words[0][i] + add[0], words[1][i] + add[1], words[0][i + 1] + add[0],
                           words[1][i + 1] + add[1], kBytes, kBytes);
  sum[0] = c[0], sum[1] = c[2];
}

/// Smallest float y with y scale >= level. @param size  1 / scale up to 2^-21
__device__ __forceinline__ float level_begin(int level, float scale, float size) {
  const float n = static_cast<float>(level);
  float y = n * size;
  y = fmaf(fmaf(-y, scale, n), size, y);  // the quotient up to little more than half a unit
  return fmaf(y, scale, -n) < 0.0f ? __uint_as_float(__float_as_uint(y) + 1u) : y;
}

/// Largest magnitude of rank `rank` in each of the two rows, 1 being the largest.
/// @param most  each row's largest magnitude
template <int kSteps>
__device__ __forceinline__ void clip_thresholds(const float (&x)[2][kSteps][8], int rank, const float (&most)[2],
                                                float (&threshold)[2]) {
  constexpr int kWords = 2 * kSteps, kChannels = 32 * kSteps;
  unsigned words[2][kWords];
  float scale[2];  // levels of a unit; where all of a row lies in level 0 it is only slower
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    scale[r] = fminf(fmaxf(__fdividef(kClipLevels - 0.5f, most[r]), 0x1p-121f), 0x1p100f);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      unsigned level[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        level[e] = __float_as_uint(__fmaf_rd(fabsf(x[r][i / 2][i % 2 * 4 + e]), scale[r], 8388608.0f));
      const unsigned four =
          __byte_perm(__byte_perm(level[0], level[1], 0x0040), __byte_perm(level[2], level[3], 0x0040), 0x5410);
      words[r][i] = four + four;
    }
  }
  // All in the units of a sum, 255 for each channel at a level or above it, and one for each of them in the uppermost
  // byte of its word: how many more than the rank there are at a row's level, and at the first one known to have fewer.
  // As unsigned numbers, levels that have enough have the smaller the higher they are, then come those that do not.
  unsigned key[2], at_low[2], above[2];  // key: 256 - 2 level in each byte
  int sum[2], at_none[2];                // what a sum of no channels at the level or above it exceeds
  const unsigned none[2] = {};
  sum_bytes(words, none, sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    key[r] = 256u * kBytes, at_none[r] = sum[r] + 256 * kChannels - 255 * rank;
    at_low[r] = static_cast<unsigned>(255 * (kChannels - rank)), above[r] = static_cast<unsigned>(-255 * rank);
  }
  const auto step = [&](auto keys, int width) {  // takes the last of the next `keys` levels, `width` apart, that may be
    const unsigned apart = 2u * static_cast<unsigned>(width) * kBytes;
    constexpr int kKeys = decltype(keys)::value;
    int taken[2] = {kKeys, kKeys};
#pragma unroll
    for (int i = 1; i <= kKeys; ++i) {
      const unsigned add[2] = {key[0] - static_cast<unsigned>(i) * apart, key[1] - static_cast<unsigned>(i) * apart};
      sum_bytes(words, add, sum);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int found = at_none[r] - 2 * kChannels * width * i - sum[r];
        at_low[r] = min(at_low[r], static_cast<unsigned>(found));
        above[r] = max(above[r], static_cast<unsigned>(found));
        taken[r] += found >> 31;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      key[r] -= static_cast<unsigned>(taken[r]) * apart;
      at_none[r] -= taken[r] * (2 * kChannels * width);
    }
  };
  step(std::integral_constant<int, 1>{}, kClipLevels / 2);
#pragma unroll 1
  for (int width = kClipLevels / 8; width > 0; width /= 4) step(std::integral_constant<int, 3>{}, width);

  // The level holds the ranks above + 1 .. at_low. Go to the one in question from the nearer end: numbers 2 y - 2 end
  // (from the upper end) or 2 end - 1 - 2 y (from the lower one), modulo 2^32, are largest for the magnitude y that is
  // nearest to the end and inside. The factor 2 drops the sign.
  int left[2];  // channels to pass, the last one is the one in question
  unsigned factor[2], offset[2], nearest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto channels = [](unsigned of) { return static_cast<int>(of * 0x8081u >> 23); };  // of / 255
    const int from_above = channels(254u - above[r]), from_below = channels(at_low[r]) + 1;
    const int level = static_cast<int>(((0u - key[r]) & 255u) / 2u);
    const bool down = from_above <= from_below;
    const float end = level_begin(level + (down ? 1 : 0), scale[r], __fdividef(1.0f, scale[r]));
    left[r] = min(from_above, from_below);
    factor[r] = down ? 2u : ~1u;
    offset[r] = down ? 0u - 2u * __float_as_uint(end) : 2u * __float_as_uint(end) - 1u;
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
