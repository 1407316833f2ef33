#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/linear_rows.cuh>

#include <type_traits>

/// What differs in four_rows.cuh if keys have mixed widths and codebook codes (SegmentSideTraits): binary products, as
/// of linear rows, with the row's words and with derived words, which a lane makes of three planes each. Queries have
/// fragments of each scale, in which the bits of other scales are 0.
namespace kvq::decode {

/// Where a lane finds the planes of its derived words. Of rows of 8 words, lane t has derived words 2 t and 2 t + 1, in
/// chunk 1; of 12 words it has word t in chunk 1, 4 + 2 t and 5 + 2 t in chunk 2.
template <typename T>
struct SegmentPlanes {
  static constexpr int kRowWords = T::KSide::kRowWords, kWords = derived_words(kRowWords) / 4, kPlanes = 3;
  /// Bytes in the tile of the row's word that a plane begins in and of the next word, 12 bits each; then the bit.
  unsigned at[kWords][kPlanes];

  static __device__ __forceinline__ int word_of(int i, int t) {
    if constexpr (kRowWords == 8)
      return 2 * t + i;
    else
      return i == 0 ? t : 3 + 2 * t + i;
  }
  __device__ __forceinline__ void load(const typename T::Operand& operand, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int bit = operand.planes[word_of(i, t)][plane], word = bit / 32;
        const auto offset = [&](int w) {
          return static_cast<unsigned>(key_word_offset(T::KSide::side(), g, min(w, kRowWords - 1)));
        };
        at[i][plane] = offset(word) | offset(word + 1) << 12 | static_cast<unsigned>(bit % 32) << 24;
      }
  }
  /// A derived word of tokens g and g + 8. Bits behind those of its channels are anything.
  __device__ __forceinline__ uint2 derived(const unsigned char* tile, int i) const {
    uint2 word = {};
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const unsigned place = at[i][plane], shift = place >> 24;
      const uint2 low = *reinterpret_cast<const uint2*>(tile + (place & 0xFFFu)),
                  high = *reinterpret_cast<const uint2*>(tile + (place >> 12 & 0xFFFu));
      word.x ^= __funnelshift_r(low.x, high.x, shift), word.y ^= __funnelshift_r(low.y, high.y, shift);
    }
    return word;
  }
};
struct NoPlanes {};
template <typename T>
using PlanesOf = std::conditional_t<T::KSide::kSegments, SegmentPlanes<T>, NoPlanes>;

/// Pairs of a scale and a chunk of words in which it has bits, as SegmentProgram::active has them, for most rows:
/// scales are sorted by width, the widest first, and derived words belong to the first ones.
template <typename Side>
__host__ __device__ constexpr unsigned usual_pairs() {
  unsigned pairs = 0;
  for (int group = 0; group < Side::kGroups; ++group)
    for (int c = 0; c < Side::kChunks; ++c) {
      const bool usual = Side::kRowWords == 8 ? group == 0 || c == 0 : group < 2 || c == 1;
      if (usual) pairs |= 1u << (kMostSegmentChunks * group + c);
    }
  return pairs;
}

/// Sums of products of a query with the bits of each scale: of tiles' tokens g and g + 8.
template <typename T>
using SegmentProducts = int[T::KSide::kGroups][T::kStageTiles][2];

/// Multiplies all tiles of a stage by a plane pair at a time, so that its fragments, which lie in shared memory, are
/// loaded once for the stage. @param words  of the tiles
/// @tparam kPairs  of scales and chunks, that are multiplied
template <typename T, unsigned kPairs>
__device__ __forceinline__ void segment_products(const uint4 (&words)[T::kStageTiles][T::KSide::kChunks],
                                                 const typename T::Operand& operand, int lane,
                                                 SegmentProducts<T>& products) {
  using Side = typename T::KSide;
  constexpr int kPlanePairs = T::kPlanes / 2;
  int odd = -2;  // factor of the odd plane: of the highest one the sign of two's complement
#pragma unroll 1
  for (int p = kPlanePairs - 1; p >= 0; --p, odd = 2) {
#pragma unroll
    for (int group = 0; group < Side::kGroups; ++group) {
      int counts[T::kStageTiles][4] = {};
#pragma unroll
      for (int c = 0; c < Side::kChunks; ++c) {
        if (!(kPairs >> (kMostSegmentChunks * group + c) & 1)) continue;
        const uint2 fragment = *reinterpret_cast<const uint2*>(
            &operand.fragments[(group * Side::kChunks + c) * kPlanePairs + p][0][lane][0]);
#pragma unroll
        for (int u = 0; u < T::kStageTiles; ++u) {
          const uint4& a = words[u][c];
          ptx::mma_m16n8k256_b1(counts[u], a.x, a.y, a.z, a.w, fragment.x, fragment.y);
        }
      }
#pragma unroll
      for (int u = 0; u < T::kStageTiles; ++u)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int& product = products[group][u][i];
          product = 4 * product + counts[u][2 * i] + odd * counts[u][2 * i + 1];
        }
    }
  }
}

/// Scores of a stage's tokens for row t, in multiples of the query's `score_scale`: of tile u those of tokens g and
/// g + 8 are 2 u and 2 u + 1.
/// @param half_sums  of q', of each scale
template <typename T>
__device__ __forceinline__ void segment_scores(const unsigned char* stage, const float (&half_sums)[T::KSide::kGroups],
                                               const SegmentPlanes<T>& planes, const typename T::Operand& operand,
                                               int lane, float (&scores)[2 * T::kStageTiles]) {
  using Side = typename T::KSide;
  constexpr int kTiles = T::kStageTiles;
  constexpr unsigned kUsual = usual_pairs<Side>(), kAllPairs = ~0u;
  uint4 words[kTiles][Side::kChunks];
  const auto two = [](const uint2& a, const uint2& b) { return make_uint4(a.x, a.y, b.x, b.y); };
#pragma unroll
  for (int u = 0; u < kTiles; ++u) {
    const unsigned char* tile = stage + u * Side::side().bytes();
    words[u][0] = *reinterpret_cast<const uint4*>(tile + lane * 16);
    if constexpr (Side::kRowWords == 8) {
      words[u][1] = two(planes.derived(tile, 0), planes.derived(tile, 1));
    } else {
      words[u][1] = two(*reinterpret_cast<const uint2*>(tile + 512 + lane * 8), planes.derived(tile, 0));
      words[u][2] = two(planes.derived(tile, 1), planes.derived(tile, 2));
    }
  }
  SegmentProducts<T> products = {};
  if (operand.active & ~kUsual)
    segment_products<T, kAllPairs>(words, operand, lane, products);
  else
    segment_products<T, kUsual>(words, operand, lane, products);
#pragma unroll
  for (int u = 0; u < kTiles; ++u) {
    const unsigned char* numbers =
        stage + u * Side::side().bytes() + Side::side().code_bytes() + 4 * (lane >> 2) * Side::kGroups;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float score = 0.0f;
#pragma unroll
      for (int group = 0; group < Side::kGroups; ++group) {
        // A scale that has no bits in any chunk is 0, or NaN in a poisoned row.
        const unsigned bits = *reinterpret_cast<const unsigned short*>(numbers + 2 * (Side::kGroups * i + group));
        score =
            fmaf(group_param(bits, Side::kBfloat), static_cast<float>(products[group][u][i]) - half_sums[group], score);
      }
      scores[2 * u + i] = score;
    }
  }
}

}  // namespace kvq::decode
