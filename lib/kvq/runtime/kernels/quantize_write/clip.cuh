#pragma once

#include <kvq/runtime/kernels/quantize_write/rows.cuh>

#include <cstdint>

/// The threshold of the percentile clip (packing.md, "Clip"): the largest magnitude of a given rank in a row, exactly.
///
/// Magnitudes are first told apart by *levels*: units of a power of two of which the largest one has 128 to 256, so
/// that a level fits a byte and its ends are exact floats. Bits of equal weight are then gathered, a *plane* each: of
/// 32 channels of a lane one word, of one weight. From the uppermost plane on, either those channels still in question
/// that have the bit are enough for the rank, then it is among them, or it is among the others. What is counted at each
/// plane is thus the bits of some words. (Binary products of tensor cores count them in fewer instructions, but wait
/// for those that rotate other rows.)
///
/// The level mostly holds one or two of the row's channels, and the one in question is the nearest to one of its ends.
namespace kvq::write {

constexpr int kLevelBits = 8;

/// Exchanges bits of two words: `a` gets the upper kWidth of every 2 kWidth bits of both, `b` the lower ones.
template <int kWidth>
__device__ __forceinline__ void part_bits(unsigned& a, unsigned& b) {
  constexpr unsigned kUpper = kWidth == 4 ? 0xF0F0F0F0u : kWidth == 2 ? 0xCCCCCCCCu : 0xAAAAAAAAu;
  const unsigned upper = ptx::lop3_select(kUpper, a, b >> kWidth);
  b = ptx::lop3_select(kUpper, a << kWidth, b);
  a = upper;
}

/// Eight words of four bytes to eight planes, the uppermost first.
__device__ __forceinline__ void bytes_to_planes(unsigned (&words)[kLevelBits]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) part_bits<4>(words[i], words[i + 4]);
#pragma unroll
  for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) part_bits<2>(words[i], words[i + 2]);
#pragma unroll
  for (int i = 0; i < 8; i += 2) part_bits<1>(words[i], words[i + 1]);
}

/// Largest magnitude of rank `rank` in each of the two rows, 1 being the largest.
/// @param most  each row's largest magnitude
template <int kSteps>
__device__ __forceinline__ void clip_thresholds(const float (&x)[2][kSteps][8], int rank, const float (&most)[2],
                                                float (&threshold)[2]) {
  constexpr int kBlocks = (kSteps + 3) / 4;  // of 32 channels of a lane, the last one perhaps of fewer
  unsigned planes[2][kBlocks][kLevelBits], there[kBlocks];
  unsigned size[2];  // of a level, the float's bits
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Levels of a unit. Where rows are so small that all is in the lowest levels it is only slower.
    const unsigned scale_bits = min(0x82800000u - (__float_as_uint(most[r]) & 0x7F800000u), 0x7E800000u);
    const float scale = __uint_as_float(scale_bits);
    size[r] = 0x7F000000u - scale_bits;
    const auto level = [&](int word, int byte) {  // in the lowest byte
      return __float_as_uint(__fmaf_rd(fabsf(x[r][word / 2][word % 2 * 4 + byte]), scale, 8388608.0f));
    };
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      constexpr int kAllWords = 2 * kSteps;
      const int words = min(8, kAllWords - 8 * b);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        planes[r][b][i] = 0;
        if (i < words) {
          const int word = 8 * b + i;
          const unsigned three = level(word, 3) * 65536u + (level(word, 2) * 256u + level(word, 1));
          planes[r][b][i] = __byte_perm(three, level(word, 0), 0x4210);
        }
      }
      // A byte of a plane has a bit of each word, of word i bit 7 - i. Words that are missing are never in question.
      there[b] = words == 8 ? kAll : (0xFF00u >> words & 0xFFu) * 0x01010101u;
      bytes_to_planes(planes[r][b]);
    }
  }
  // From here on two lanes have one row, so that a count is one exchange away from its sum: lanes t < 2 the row of
  // token g, the others that of g + 8. Of the two, each has the planes of two lanes.
  const bool second = threadIdx.x & 2;
  unsigned words[2 * kBlocks][kLevelBits], in_question[2 * kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kLevelBits; ++i) {
      words[2 * b][i] = second ? planes[1][b][i] : planes[0][b][i];
      words[2 * b + 1][i] = __shfl_xor_sync(kAll, second ? planes[0][b][i] : planes[1][b][i], 2);
    }
    in_question[2 * b] = in_question[2 * b + 1] = there[b];
  }
  const auto count = [&](auto word) {  // of bits in the row's words
    int sum = 0;
#pragma unroll
    for (int b = 0; b < 2 * kBlocks; ++b) sum += __popc(word(b));
    return static_cast<unsigned>(sum + __shfl_xor_sync(kAll, sum, 1));
  };
  // Less than no channels: how many are still missing among those in question.
  unsigned missing = 0u - static_cast<unsigned>(rank);
  int level = 255;  // the last one, less what is found out
#pragma unroll
  for (int plane = 0; plane < kLevelBits; ++plane) {
    const unsigned with = missing + count([&](int b) { return in_question[b] & words[b][plane]; });
    const int few = static_cast<int>(with) >> 31;  // all bits if those that have the bit are too few
    missing = max(missing, with);                  // with is small if they are not
    level -= few & (128 >> plane);
#pragma unroll
    for (int b = 0; b < 2 * kBlocks; ++b)
      in_question[b] = ptx::lop3_and_xor(in_question[b], words[b][plane], static_cast<unsigned>(few));
  }
  // What both rows' lanes want to know: the level, how far down in it, of how many.
  const unsigned mine =
      static_cast<unsigned>(level) | (0u - missing) << 8 | count([&](int b) { return in_question[b]; }) << 20;
  const unsigned theirs = __shfl_xor_sync(kAll, mine, 2), found[2] = {second ? theirs : mine, second ? mine : theirs};

  // Go to the one in question from the nearer end of its level: numbers 2 y - 2 end (from the upper end) or 2 end - 1 -
  // 2 y (from the lower one), modulo 2^32, are largest for the magnitude y that is nearest to the end and inside. The
  // factor 2 drops the sign.
  int left[2];  // channels to pass, the last one is the one in question
  unsigned factor[2], offset[2], nearest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int from_above = static_cast<int>(found[r] >> 8 & 0xFFFu),
              from_below = static_cast<int>(found[r] >> 20) - from_above + 1;
    const bool down = from_above <= from_below;
    const float end = static_cast<float>((found[r] & 0xFFu) + (down ? 1 : 0)) * __uint_as_float(size[r]);
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
