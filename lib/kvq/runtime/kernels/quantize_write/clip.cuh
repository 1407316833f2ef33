#pragma once

#include <kvq/runtime/kernels/quantize_write/rows.cuh>

#include <cstdint>

/// The threshold of the percentile clip (packing.md, "Clip"): the largest magnitude of a given rank in a row, exactly.
///
/// Magnitudes are compared by their upper 16 bits first, as pairs of bfloat16: one instruction compares two channels,
/// and a product of tensor cores with ones counts over the row's four lanes. A binary search finds the bucket of
/// floats that the rank falls into; it nearly always holds one or two of the row's channels, and the one in question is
/// the nearest to one of the bucket's ends.
namespace kvq::write {

/// The upper halves of two magnitudes.
__device__ __forceinline__ unsigned upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632) & 0x7FFF7FFFu;
}

/// 1.0 where a bfloat16 of `a` is at least that of b, else 0.
__device__ __forceinline__ unsigned at_least(unsigned a, unsigned b) {
  const __nv_bfloat162 flags =
      __hge2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&flags);
}

/// How many magnitudes of each row have upper halves of at least `key`. All lanes of a row get the row's.
template <int kPairs>
__device__ __forceinline__ void count_at_least(const unsigned (&halves)[2][kPairs], const int (&key)[2],
                                               int (&count)[2]) {
  constexpr unsigned kOnes = 0x3F803F80u;
  float c[2][4] = {};
  const unsigned pivot[2] = {static_cast<unsigned>(key[0]) * 0x10001u, static_cast<unsigned>(key[1]) * 0x10001u};
#pragma unroll
  for (int i = 0; i < kPairs; i += 2)
    ptx::mma_m16n8k16_bf16(c[i / 2 % 2], at_least(halves[0][i], pivot[0]), at_least(halves[1][i], pivot[1]),
                           at_least(halves[0][i + 1], pivot[0]), at_least(halves[1][i + 1], pivot[1]), kOnes, kOnes);
  count[0] = static_cast<int>(c[0][0] + c[1][0]), count[1] = static_cast<int>(c[0][2] + c[1][2]);
}

/// The largest upper half of a row.
template <int kPairs>
__device__ __forceinline__ int largest_half(const unsigned (&halves)[kPairs]) {
  unsigned most = halves[0];
#pragma unroll
  for (int i = 1; i < kPairs; ++i) most = __vmaxu2(most, halves[i]);
  most = max(most >> 16, most & 0xFFFFu);
  most = max(most, __shfl_xor_sync(kAll, most, 1));
  return static_cast<int>(max(most, __shfl_xor_sync(kAll, most, 2)));
}

/// Largest magnitude of rank `rank` in each of the two rows, 1 being the largest.
template <int kSteps>
__device__ __forceinline__ void clip_thresholds(const float (&x)[2][kSteps][8], int rank, float (&threshold)[2]) {
  constexpr int kPairs = 4 * kSteps, kDim = 32 * kSteps;
  unsigned halves[2][kPairs];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) halves[r][4 * j + i] = upper_halves(x[r][j][2 * i], x[r][j][2 * i + 1]);

  // Invariant of the search: at_base >= rank > above, the counts at `base` and at base + 2^bit. It begins two octaves
  // wide below the largest magnitude; if the rank is not in there, with all there is.
  const int most[2] = {largest_half(halves[0]), largest_half(halves[1])};
  int base[2], at_base[2], above[2];
  for (int top = 7;; top = 14) {
    int start[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      start[r] = max(most[r] + 1 - (2 << top), 0);
      base[r] = start[r], at_base[r] = kDim, above[r] = 0;
    }
#pragma unroll 1
    for (int bit = top; bit >= 0; --bit) {
      const int key[2] = {base[0] + (1 << bit), base[1] + (1 << bit)};
      int count[2];
      count_at_least(halves, key, count);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (count[r] >= rank)
          base[r] = key[r], at_base[r] = count[r];
        else
          above[r] = count[r];
      }
    }
    // Where no key was taken, nothing has shown yet that the start is low enough.
    if (!__any_sync(kAll, (base[0] == start[0] && start[0] > 0) || (base[1] == start[1] && start[1] > 0))) break;
    int count[2];
    count_at_least(halves, start, count);
    if (!__any_sync(kAll, count[0] < rank || count[1] < rank)) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (base[r] == start[r]) at_base[r] = count[r];
      break;
    }
  }

  // The bucket holds the ranks above + 1 .. at_base. Go to the one in question from the nearer end: numbers 2 y - 2 end
  // (from the upper end) or 2 end - 1 - 2 y (from the lower one), modulo 2^32, are largest for the magnitude y that is
  // nearest to the end and inside. The factor 2 drops the sign.
  int left[2];  // channels to pass, the last one is the one in question
  unsigned factor[2], offset[2], nearest[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int from_above = rank - above[r], from_below = at_base[r] - rank + 1;
    const bool down = from_above <= from_below;
    left[r] = down ? from_above : from_below;
    factor[r] = down ? 2u : ~1u;
    offset[r] = down ? 0u - (static_cast<unsigned>(base[r] + 1) << 17) : (static_cast<unsigned>(base[r]) << 17) - 1u;
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
