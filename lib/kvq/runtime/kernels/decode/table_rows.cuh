#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/linear_rows.cuh>

/// What differs in four_rows.cuh if rows are codebook codes of 3 or 4 bits (TableSideTraits): a channel is the row's
/// scale times a sum of weight[S] x[S] over the odd sets S of its code's bits, x[S] = +1/2 or -1/2 (table_layout.h).
///
/// Keys: binary products as of linear rows (linear_rows.cuh). Words of single bits lie in the tile; one exclusive or of
/// three of them makes a word of another set, of 32 channels at once. The queries kernel has multiplied the query by
/// the weights.
///
/// Values: of each odd set, a mask leaves one bit of each of four tokens, times a power of two. The products of all
/// sets of a channel end in the same accumulator, each times its weight. Row r of channel block b is the channel
/// table_value_channel(16 b + r).
namespace kvq::decode {

/// Scores of a tile's tokens g and g + 8 for row t, in multiples of the query's `score_scale`: linear_scores() for
/// codebook codes.
template <typename T>
__device__ __forceinline__ void table_scores(const unsigned char* tile, const unsigned (&fragment)[T::kSteps][2],
                                             float half_sum, int lane, float& score0, float& score1) {
  using Side = typename T::KSide;
  constexpr int kPlanePairs = T::kPlanes / 2, kBits = Side::kBits;
  const int g = lane >> 2, t = lane & 3;
  int counts[kPlanePairs][4] = {};
  const auto multiply = [&](int chunk, unsigned a0, unsigned a1, unsigned a2, unsigned a3) {
#pragma unroll
    for (int p = 0; p < kPlanePairs; ++p) {
      const auto& planes = fragment[chunk * kPlanePairs + p];
      ptx::mma_m16n8k256_b1(counts[p], a0, a1, a2, a3, planes[0], planes[1]);
    }
  };
  // Bits 0, 1, ... of unit t, of tokens g and g + 8.
  uint2 bits[kBits];
#pragma unroll
  for (int i = 0; i < kBits; ++i)
    bits[i] = *reinterpret_cast<const uint2*>(tile + key_word_offset(Side::side(), g, kBits * t + i));
  const auto word_of_set = [&](int set) {
    uint2 word = {};
#pragma unroll
    for (int i = 0; i < kBits; ++i)
      if (odd_set(kBits, set) >> i & 1) word.x ^= bits[i].x, word.y ^= bits[i].y;
    return word;
  };
  const uint4 first = *reinterpret_cast<const uint4*>(tile + lane * 16);
  multiply(0, first.x, first.y, first.z, first.w);
  if constexpr (kBits == 3) {
    const uint2 last = *reinterpret_cast<const uint2*>(tile + 512 + lane * 8), derived = word_of_set(3);
    multiply(1, last.x, last.y, derived.x, derived.y);
  } else {
    const uint4 second = *reinterpret_cast<const uint4*>(tile + 512 + lane * 16);
    multiply(1, second.x, second.y, second.z, second.w);
#pragma unroll
    for (int c = 2; c < Side::kChunks; ++c) {
      const uint2 even = word_of_set(2 * c), odd = word_of_set(2 * c + 1);
      multiply(c, even.x, even.y, odd.x, odd.y);
    }
  }
  const GroupParams<Side> params(tile, 0, g);
  float scores[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    scores[i] = params.scale[i] * (static_cast<float>(product_of_counts(counts, i)) - half_sum);
  score0 = scores[0], score1 = scores[1];
}

/// A lane's bytes of one unit of values, of four tokens in each word: of rows g and g + 8 of some channel blocks.
/// field(S, i, ...) is a word with x of the odd set S, of the i-th of the lane's neighboring channels, in one bit of
/// each byte.
template <int kBits>
struct TableCodes;

/// Three bits: a byte with bits 0 and 1 of four channels, and one with bit 2 of eight, of which the lane needs four.
template <>
struct TableCodes<3> {
  static constexpr int kChannels = 4;  ///< neighboring channels of the lane
  unsigned low, high, parity;          ///< parity: of bits 0 and 1, at the places of bit 0

  TableCodes() = default;
  __device__ __forceinline__ TableCodes(const unsigned char* tile, int unit, int lane) {
    constexpr TileSide kSide = TableSideTraits<kTableHeadDim, 3>::side();
    const int g = lane >> 2, token = 2 * (lane & 3);  // the first of the word's tokens
    const auto word = [&](int byte) {
      return *reinterpret_cast<const unsigned*>(tile + value_byte_offset(kSide, token, 12 * unit + byte));
    };
    low = word(g), high = word(8 + g / 2) >> g % 2 * 4;
    parity = low ^ low >> 1;
  }
  /// Bit of a byte that field() leaves.
  static __device__ constexpr int place(int set, int i) { return set == 2 ? i : 2 * i + (set == 1 ? 1 : 0); }
  __device__ __forceinline__ unsigned field(int set, int i) const {
    const unsigned all = set == 2 ? high : set == 3 ? parity ^ high << i : low;
    return all & 0x01010101u << place(set, i);
  }
};

/// Four bits: a byte with two channels.
template <>
struct TableCodes<4> {
  static constexpr int kChannels = 2;
  unsigned codes, derived[4];  ///< derived: the sets of three bits, at the places of bit 0

  TableCodes() = default;
  __device__ __forceinline__ explicit TableCodes(unsigned word) : codes(word) {
    const unsigned one = word >> 1, two = word >> 2, three = word >> 3;
    derived[0] = word ^ one ^ two, derived[1] = word ^ one ^ three;
    derived[2] = word ^ two ^ three, derived[3] = one ^ two ^ three;
  }
  static __device__ constexpr int place(int set, int i) { return 4 * i + (set < 4 ? set : 0); }
  __device__ __forceinline__ unsigned field(int set, int i) const {
    return (set < 4 ? codes : derived[set - 4]) & 0x01010101u << place(set, i);
  }
};

/// Adds the values of a stage's tokens, times their weights, to sums for channels.
/// @param values        tiles
/// @param columns       of each tile: the second operand
/// @param weight_scale  of integer weights of tokens
/// @param set_weights   Operand::value_weights
template <typename T, int kTiles>
__device__ __forceinline__ void add_table_values(const unsigned char* values, const unsigned (&columns)[kTiles],
                                                 float weight_scale, const float* set_weights, int lane,
                                                 float (&out)[T::kSumBlocks][2]) {
  using Side = typename T::VSide;
  using Codes = TableCodes<Side::kBits>;
  constexpr int kHalves = 2;  // rows g and g + 8
  // Adds the products of channel blocks first_block + i. codes(tile, half) are the lane's codes.
  const auto add_blocks = [&](int first_block, const auto& codes) {
#pragma unroll
    for (int set = 0; set < Side::kSets; ++set) {
      const float weight = weight_scale * set_weights[set];
#pragma unroll
      for (int i = 0; i < Codes::kChannels; ++i) {
        int sums[4] = {};
#pragma unroll
        for (int u = 0; u < kTiles; u += 2)
          ptx::mma_m16n8k32_u8u8(sums, codes(u, 0).field(set, i), codes(u, 1).field(set, i),
                                 codes(u + 1, 0).field(set, i), codes(u + 1, 1).field(set, i), columns[u],
                                 columns[u + 1]);
        const float factor = weight * (1.0f / static_cast<float>(1 << Codes::place(set, i)));
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          float& to = out[first_block + i][half];
          to = fmaf(static_cast<float>(sums[2 * half] * 256 + sums[2 * half + 1]), factor, to);
        }
      }
    }
  };
  if constexpr (Side::kBits == 3) {
#pragma unroll
    for (int pair = 0; pair < kTableUnits / 2; ++pair) {
      const auto tile = [&](int u) { return values + u * Side::side().bytes(); };
      Codes codes[kTiles][kHalves];
#pragma unroll
      for (int u = 0; u < kTiles; ++u)
#pragma unroll
        for (int half = 0; half < kHalves; ++half) codes[u][half] = Codes(tile(u), 2 * pair + half, lane);
      add_blocks(4 * pair, [&](int u, int half) -> const Codes& { return codes[u][half]; });
    }
  } else {
#pragma unroll
    for (int unit = 0; unit < kTableUnits; ++unit) {
      Codes codes[kTiles][kHalves];
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const uint2 words = *reinterpret_cast<const uint2*>(values + u * Side::side().bytes() + unit / 2 * 512 +
                                                            lane * 16 + unit % 2 * 8);
        codes[u][0] = Codes(words.x), codes[u][1] = Codes(words.y);
      }
      add_blocks(2 * unit, [&](int u, int half) -> const Codes& { return codes[u][half]; });
    }
  }
}

}  // namespace kvq::decode
