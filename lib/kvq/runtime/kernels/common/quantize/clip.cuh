#pragma once

#include <kvq/runtime/kernels/common/quantize/rows.cuh>

#include <cstdint>

/// The threshold of the percentile clip (packing.md, "Clip"): the largest magnitude of a given rank in a row, exactly.
///
/// The search first works on *levels*: magnitudes rounded down to multiples of a power of two, chosen so that the
/// largest magnitude has level 128 to 255. A level fits a byte, and its ends are exact floats. The bits of levels are
/// transposed into *planes*: a plane has one bit of each of a lane's 32 channels in one word, all of the same weight. A
/// radix select goes from the uppermost plane down: if the candidates that have the bit are enough for the rank, the
/// threshold is one of them, otherwise it is one of the other candidates. Each plane thus takes popcounts of a few
/// words. (Binary products of tensor cores would count in fewer instructions, but they wait for the products that
/// rotate other rows.)
///
/// The level that is found mostly holds one or two of the row's channels; the second phase walks from the nearer end of
/// the level to the threshold.
namespace kvq::write {

constexpr int kLevelBits = 8;

/// One step of a bit transposition: `a` gets the upper kWidth of every 2 kWidth bits of both words, `b` the lower ones.
template <int kWidth>
__device__ __forceinline__ void exchange_bits(unsigned& a, unsigned& b) {
  constexpr unsigned kUpper = kWidth == 4 ? 0xF0F0F0F0u : kWidth == 2 ? 0xCCCCCCCCu : 0xAAAAAAAAu;
  const unsigned upper = ptx::lop3_select(kUpper, a, b >> kWidth);
  b = ptx::lop3_select(kUpper, a << kWidth, b);
  a = upper;
}

/// Transposes eight words of four bytes into eight planes, the uppermost first.
__device__ __forceinline__ void bytes_to_planes(unsigned (&words)[kLevelBits]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) exchange_bits<4>(words[i], words[i + 4]);
#pragma unroll
  for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) exchange_bits<2>(words[i], words[i + 2]);
#pragma unroll
  for (int i = 0; i < 8; i += 2) exchange_bits<1>(words[i], words[i + 1]);
}

/// Largest magnitude of rank `rank` in each of the two rows, 1 being the largest.
/// @param most  each row's largest magnitude
template <int kSteps>
__device__ __forceinline__ void clip_thresholds(const float (&x)[2][kSteps][8], int rank, const float (&most)[2],
                                                float (&threshold)[2]) {
  constexpr int kBlocks = (kSteps + 3) / 4;  // blocks of 32 channels of a lane, the last one perhaps of fewer
  unsigned planes[2][kBlocks][kLevelBits], present[kBlocks];
  unsigned size[2];  // of a level, the float's bits
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // 1 / width of a level. It is limited, so all levels of very small rows are low; that is only slower.
    const unsigned scale_bits = min(0x82800000u - (__float_as_uint(most[r]) & 0x7F800000u), 0x7E800000u);
    const float scale = __uint_as_float(scale_bits);
    size[r] = 0x7F000000u - scale_bits;
    const auto level = [&](int word, int byte) {  // the level, in the lowest byte
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
      // Bit 7 - i of each byte of a plane belongs to word i. Missing words are never candidates.
      present[b] = words == 8 ? kAll : (0xFF00u >> words & 0xFFu) * 0x01010101u;
      bytes_to_planes(planes[r][b]);
    }
  }
  // From here on two lanes share one row, so that one shuffle sums a count: lanes t < 2 have the row of token g, lanes
  // t >= 2 that of token g + 8. Each of the two lanes has the planes of two lanes.
  const bool second = threadIdx.x & 2;
  unsigned words[2 * kBlocks][kLevelBits], candidates[2 * kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kLevelBits; ++i) {
      words[2 * b][i] = second ? planes[1][b][i] : planes[0][b][i];
      words[2 * b + 1][i] = __shfl_xor_sync(kAll, second ? planes[0][b][i] : planes[1][b][i], 2);
    }
    candidates[2 * b] = candidates[2 * b + 1] = present[b];
  }
  const auto count = [&](auto word) {  // number of bits that are set in the row's words
    int sum = 0;
#pragma unroll
    for (int b = 0; b < 2 * kBlocks; ++b) sum += __popc(word(b));
    return static_cast<unsigned>(sum + __shfl_xor_sync(kAll, sum, 1));
  };
  // Minus the rank of the threshold among the candidates, modulo 2^32.
  unsigned missing = 0u - static_cast<unsigned>(rank);
  int level = 255;  // the largest level that is still possible
#pragma unroll
  for (int plane = 0; plane < kLevelBits; ++plane) {
    const unsigned with = missing + count([&](int b) { return candidates[b] & words[b][plane]; });
    const int few = static_cast<int>(with) >> 31;  // all ones if the candidates with the bit are too few
    missing = max(missing, with);                  // as unsigned, `with` is smaller if they are not
    level -= few & (128 >> plane);
#pragma unroll
    for (int b = 0; b < 2 * kBlocks; ++b)
      candidates[b] = ptx::lop3_and_xor(candidates[b], words[b][plane], static_cast<unsigned>(few));
  }
  // Exchanged between the lanes of both rows: level, rank of the threshold in the level, channels in the level.
  const unsigned own =
      static_cast<unsigned>(level) | (0u - missing) << 8 | count([&](int b) { return candidates[b]; }) << 20;
  const unsigned other = __shfl_xor_sync(kAll, own, 2), found[2] = {second ? other : own, second ? own : other};

  // Walk to the threshold from the nearer end of its level. With bits of floats as integers modulo 2^32,
  // 2 y - 2 end (from the upper end) or 2 end - 1 - 2 y (from the lower end) is largest for the magnitude y inside the
  // level that is nearest to the end. The factor 2 drops the sign.
  int left[2];  // channels to walk; the last of them is the threshold
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
    // At least one row has to walk further: past all channels of this magnitude.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int equal = 0;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) equal += (__float_as_uint(x[r][j][e]) & 0x7FFFFFFFu) == nearest[r];
      equal += __shfl_xor_sync(kAll, equal, 1);
      equal += __shfl_xor_sync(kAll, equal, 2);
      // At least one channel, so that the loop ends for rows with NaNs, too.
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
