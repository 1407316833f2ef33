#pragma once

#include <kvq/runtime/kernels/common/page_view.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/sequences.cuh>
#include <kvq/runtime/kernels/dequantize/page_tile.cuh>
#include <kvq/runtime/kernels/dequantize/traits.cuh>

#include <type_traits>

/// From stored bytes to operands of mma.sync. A warp reads 16 tokens of one head and side as the fp16 operand of
/// products of 16 tokens by 16 channels (a step). Codes are small integers, hence exact in fp16; exact (bfloat16) rows
/// are exact, too, once a power of two is divided out of each row. Scales and minima are applied behind the product.
///
/// Any assignment of channels to steps is right if the rows of the other operand have the same order. It is chosen so
/// that each lane loads its own codes.
namespace kvq::dequantize {

/// The indices of the centroids of a lane's tokens; negative: a row without one.
template <int kTiles>
struct FragmentCentroids {
  int centroid[kTiles][2];
};
struct NoFragmentCentroids {};

/// The part of tiles of 16 tokens that lane 4 g + t holds: tokens g and g + 8 of each.
template <typename Side, int kTiles>
struct Fragments : std::conditional_t<(Side::kIndexBytes > 0), FragmentCentroids<kTiles>, NoFragmentCentroids> {
  unsigned a[kTiles][Steps<Side>::kCount][4];
  float scale[kTiles][2][Steps<Side>::kGroups], minimum[kTiles][2][Steps<Side>::kGroups];  ///< of the two tokens
};

/// Two 8-bit integers as fp16, exactly: 1024 + x has x in its last bits. @param selector  __byte_perm() of the two
/// bytes
__device__ __forceinline__ unsigned halves_of(unsigned bytes, unsigned selector) {
  const unsigned biased = __byte_perm(bytes, 0x64646464u, selector), bias = 0x64006400u;
  const __half2 two = __hsub2(*reinterpret_cast<const __half2*>(&biased), *reinterpret_cast<const __half2*>(&bias));
  return *reinterpret_cast<const unsigned*>(&two);
}

/// Loads a scale or minimum.
template <typename Side>
__device__ __forceinline__ float load_param(const std::byte* at, int i) {
  const unsigned short bits = __ldg(reinterpret_cast<const unsigned short*>(at) + i);
  return Side::kBfloat ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

/// Reads a tile of codes into tile `n` of `f`. All lanes of a warp call it.
template <typename Side, int kTiles>
__device__ __forceinline__ void read_coded(const std::byte* tile, bool value, int lane, Fragments<Side, kTiles>& f,
                                           int n) {
  if constexpr (!Side::kExact) {
    constexpr int kWords = Side::kWords, kChunk = chunk_bytes(Side::side()), kInChunk = kChunk / 4;
    const int g = lane / 4;
    unsigned words[2 * kWords];
#pragma unroll
    for (int c = 0; c < 2 * kWords / kInChunk; ++c) {
      const std::byte* at = tile + (c * 32 + lane) * kChunk;
      if constexpr (kChunk == 16) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(at));
        words[4 * c] = four.x, words[4 * c + 1] = four.y, words[4 * c + 2] = four.z, words[4 * c + 3] = four.w;
      } else {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
        words[2 * c] = two.x, words[2 * c + 1] = two.y;
      }
    }
#pragma unroll
    for (int group = 0; group < Side::kGroups; ++group)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::byte* at = tile + number_offset(Side::side(), g + 8 * r, group, 0);
        f.scale[n][r][group] = load_param<Side>(at, 0);
        f.minimum[n][r][group] = Side::kAffine ? load_param<Side>(at, 1) : -0.5f * Side::kLevels * f.scale[n][r][group];
      }
    const auto codes = [&](int word, int slice) { return words[word] >> (slice * Side::kBits) & Side::kMask; };
    if (value) {
      // A word has the tokens 2 u, 2 u + 8, 2 u + 1, 2 u + 9 of one channel, so the fragment is transposed.
#pragma unroll
      for (int step = 0; step < Steps<Side>::kCount; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned four = codes(step / Side::kPerByte * 2 + half, step % Side::kPerByte);
          f.a[n][step][2 * half] = ptx::movmatrix_trans(halves_of(four, 0x4240));
          f.a[n][step][2 * half + 1] = ptx::movmatrix_trans(halves_of(four, 0x4341));
        }
    } else {
      constexpr int kPaired = kWords / 2 * Side::kPerByte;
#pragma unroll
      for (int step = 0; step < Steps<Side>::kCount; ++step) {
        const int j = step / 2, w = step % 2;
        const int word = j < kPaired ? j / Side::kPerByte * 2 + w : kWords - 1,
                  slice = j < kPaired ? j % Side::kPerByte : (j - kPaired) * 2 + w;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const unsigned four = codes(r * kWords + word, slice);
          f.a[n][step][r] = halves_of(four, 0x4140);
          f.a[n][step][2 + r] = halves_of(four, 0x4342);
        }
      }
    }
  }
}

/// Reads the index of tile `n`'s token that is row r of this lane's two. One that is too large counts as the last one.
template <typename Side, int kTiles>
__device__ __forceinline__ void read_index(const RowCode& code, const std::byte* tile, int r, int lane,
                                           Fragments<Side, kTiles>& f, int n) {
  if constexpr (Side::kIndexBytes > 0) {
    static_assert(Side::kIndexBytes == 1);
    const auto* at = reinterpret_cast<const unsigned char*>(tile + index_offset(Side::side(), lane / 4 + 8 * r));
    f.centroid[n][r] = min(static_cast<int>(__ldg(at)), code.num_centroids - 1);
  }
}

/// Reads one row of an exact (bfloat16) tile as row r of this lane's two. The four lanes of the row call it together.
/// @param tile  the 16 tokens of the row's head and side; values have the channel order of coded tiles
template <typename Side>
__device__ __forceinline__ void read_exact(const std::byte* tile, int token, bool value, int r, int lane,
                                           Fragments<Side, 1>& f) {
  constexpr int kCount = Steps<Side>::kCount;
  const int t = lane % 4;
  unsigned pairs[kCount][2];
  float most = 0.0f;
#pragma unroll
  for (int step = 0; step < kCount; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int permuted = value ? 16 * step + 8 * half + 2 * t : 32 * (step / 2) + 8 * t + step % 2 * 4 + half * 2;
      pairs[step][half] =
          __ldg(reinterpret_cast<const unsigned*>(tile + exact_offset(Side::kHeadDim, token, permuted)));
      most = fmaxf(most, fmaxf(fabsf(__uint_as_float(pairs[step][half] << 16)),
                               fabsf(__uint_as_float(pairs[step][half] & 0xFFFF0000u))));
    }
  const unsigned lanes = 0xFu << (lane & ~3);
  most = fmaxf(most, __shfl_xor_sync(lanes, most, 1));
  most = fmaxf(most, __shfl_xor_sync(lanes, most, 2));
  // The largest magnitude becomes 2^14 to 2^15. Numbers 2^28 times smaller lose digits, which is negligible.
  const int exponent = max(static_cast<int>(__float_as_uint(most) >> 23) - 127 - 14, -100);
  const float row_scale = __uint_as_float(static_cast<unsigned>(127 + exponent) << 23),
              inverse = __uint_as_float(static_cast<unsigned>(127 - exponent) << 23);
#pragma unroll
  for (int step = 0; step < kCount; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __half2 two = __floats2half2_rn(__uint_as_float(pairs[step][half] << 16) * inverse,
                                            __uint_as_float(pairs[step][half] & 0xFFFF0000u) * inverse);
      f.a[0][step][2 * half + r] = *reinterpret_cast<const unsigned*>(&two);
    }
#pragma unroll
  for (int group = 0; group < Steps<Side>::kGroups; ++group)
    f.scale[0][r][group] = row_scale, f.minimum[0][r][group] = 0.0f;
}

template <typename KSide, typename VSide>
__device__ __forceinline__ PageLayout page_layout(const PagedCacheView& cache) {
  return {KSide::side(), VSide::side(), cache.num_kv_heads, 1 << cache.page_shift};
}

/// Tile `n` of `f` for a page that cannot be read: rows of NaN. @param scale  NaN, or 0 for rows of zeros
template <typename Side, int kTiles>
__device__ __forceinline__ void fill_tile(Fragments<Side, kTiles>& f, int n, float scale) {
#pragma unroll
  for (int step = 0; step < Steps<Side>::kCount; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) f.a[n][step][i] = 0;
#pragma unroll
  for (int group = 0; group < Steps<Side>::kGroups; ++group)
#pragma unroll
    for (int r = 0; r < 2; ++r) f.scale[n][r][group] = f.minimum[n][r][group] = scale;
  if constexpr (Side::kIndexBytes > 0) f.centroid[n][0] = f.centroid[n][1] = -1;
}

/// Reads those of the tokens first .. first + 15 of a sequence that lie in [begin, end), from pages or windows; the
/// other rows are zeros.
/// @param first  a multiple of 16
template <typename KSide, typename VSide, typename Side>
__device__ __forceinline__ void read_mixed(const PagedCacheView& cache, const SequenceTokens& tokens, int sequence,
                                           int head, bool value, int first, int begin, int end, int lane,
                                           Fragments<Side, 1>& f) {
  fill_tile(f, 0, 0.0f);
  const PositionRange coded = tokens.coded_from(begin);
  const std::byte* page = nullptr;
  if (max(first, coded.begin) < min(first + kTileTokens, min(end, coded.end))) {
    page = page_tile(cache, page_layout<KSide, VSide>(cache), sequence, head, value, first);
    if (page)
      read_coded<Side>(page, value, lane, f, 0);
    else
      fill_tile(f, 0, kNaN);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int position = first + lane / 4 + 8 * r;
    if (position < begin || position >= end) {
#pragma unroll
      for (int group = 0; group < Steps<Side>::kGroups; ++group) f.scale[0][r][group] = f.minimum[0][r][group] = 0.0f;
    } else if (coded.contains(position)) {
      if constexpr (Side::kExact)
        if (page) read_exact<Side>(page, position % kTileTokens, value, r, lane, f);
      if (page) read_index(value ? cache.code_v : cache.code_k, page, r, lane, f, 0);
    } else {
      int row;
      const std::byte* tile = exact_tiles(cache, position < tokens.sink_end, sequence, head, position, row) +
                              (value ? cache.ring_layout.k.bytes() : 0);
      read_exact<Side>(tile, row % kTileTokens, value, r, lane, f);
    }
  }
}

}  // namespace kvq::dequantize
