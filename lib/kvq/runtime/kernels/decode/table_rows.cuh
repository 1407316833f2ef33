#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/levels.cuh>
#include <kvq/runtime/kernels/decode/linear_rows.cuh>
#include <kvq/runtime/kernels/decode/stages.cuh>

/// What differs in four_rows.cuh if rows are codebook codes of 3 or 4 bits (TableSideTraits): a channel is the row's
/// scale times a sum of weight[S] x[S] over the odd sets S of its code's bits, x[S] = +1/2 or -1/2 (table_layout.h).
///
/// Keys: binary products as of linear rows (linear_rows.cuh). Words of single bits lie in the tile; one exclusive or of
/// three of them makes a word of another set, of 32 channels at once. The queries kernel has multiplied the query by
/// the weights.
///
/// Values: codes of four tokens of two tiles each are put into the nibbles of a word and looked up (levels.cuh): low
/// nibbles of its bytes are of the first tile. Row r of channel block b is the channel table_value_channel(16 b + r).
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
  for (int i = 0; i < 2; ++i) scores[i] = score_of_product(product_of_counts(counts, i), params.scale[i], half_sum);
  score0 = scores[0], score1 = scores[1];
}

/// A lane's bytes of one unit of values, of four tokens in each word, for row g or g + 8 of some channel blocks.
template <int kBits>
struct TableCodes;

/// Three bits: a byte with bits 0 and 1 of four channels, and one with bit 2 of eight, of which the lane needs four.
template <>
struct TableCodes<3> {
  static constexpr int kChannels = 4;  ///< neighboring channels of the lane
  unsigned low, high;                  ///< high: in nibble g mod 2 of each byte

  TableCodes() = default;
  __device__ __forceinline__ TableCodes(const unsigned char* tile, int unit, int lane) {
    constexpr TileSide kSide = TableSideTraits<kTableHeadDim, 3>::side();
    const int g = lane >> 2, token = 2 * (lane & 3);  // the first of the word's tokens
    const auto word = [&](int byte) {
      return *reinterpret_cast<const unsigned*>(tile + value_byte_offset(kSide, token, 12 * unit + byte));
    };
    low = word(g), high = word(8 + g / 2);
  }
};

/// Four bits: a byte with two channels.
template <>
struct TableCodes<4> {
  static constexpr int kChannels = 2;
  unsigned codes;

  TableCodes() = default;
  __device__ __forceinline__ explicit TableCodes(unsigned word) : codes(word) {}
};

/// Levels of the lane's channels, of four tokens in two tiles: for channel i of the first two tokens of each, then of
/// the others.
__device__ __forceinline__ void levels_of_tiles(const uint4& table, const TableCodes<3>& first,
                                                const TableCodes<3>& second, int lane, uint2 (&levels)[4]) {
  constexpr unsigned kLow = 0x0F0F0F0Fu, kTwo = 0x33333333u, kThird = 0x44444444u;
  const int nibble = lane & 4;  // first bit of nibble g mod 2; the shift to the left is a product, on another pipe
  const unsigned low[2] = {ptx::lop3_select(kLow, first.low, second.low << 4),
                           ptx::lop3_select(kLow, first.low >> 4, second.low)},
                 high = ptx::lop3_select(kLow, first.high >> nibble, second.high * (16u >> nibble));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned third = i < 2 ? high << (2 - i) : high >> (i - 2);
    levels[i] = eight_levels<3>(table, (low[i / 2] >> 2 * (i % 2) & kTwo) | (third & kThird), 0);
  }
}
__device__ __forceinline__ void levels_of_tiles(const uint4& table, const TableCodes<4>& first,
                                                const TableCodes<4>& second, int, uint2 (&levels)[2]) {
  constexpr unsigned kLow = 0x0F0F0F0Fu;
  const unsigned codes[2] = {ptx::lop3_select(kLow, first.codes, second.codes << 4),
                             ptx::lop3_select(kLow, first.codes >> 4, second.codes)};
#pragma unroll
  for (int i = 0; i < 2; ++i) levels[i] = eight_levels<4>(table, codes[i] & 0x77777777u, codes[i] >> 1 & 0x44444444u);
}

/// Adds the values of a stage's tokens, times their weights, to sums for channels.
/// @param values   tiles
/// @param weights  of each four rows; of each two tiles, columns are of tokens 2 t and 2 t + 8 of both, then of the
/// others
/// @param states   FourRowsState of each four rows
template <typename T, typename State>
__device__ __forceinline__ void add_table_values(const unsigned char* values,
                                                 const StageWeights<T> (&weights)[T::kFours], const LevelTable& of,
                                                 int lane, State (&states)[T::kFours]) {
  using Side = typename T::VSide;
  using Codes = TableCodes<Side::kBits>;
  constexpr int kTiles = T::kStageTiles, kHalves = 2, kChannels = Codes::kChannels;  // halves: rows g and g + 8
  const uint4 table = *reinterpret_cast<const uint4*>(of.levels);
  float factors[T::kFours];
#pragma unroll
  for (int four = 0; four < T::kFours; ++four) factors[four] = weights[four].scale * of.step;
  // Adds the products of channel blocks first_block + i. codes_of(tile, half) are the lane's codes.
  const auto add_blocks = [&](int first_block, const auto& codes_of) {
    int sums[T::kFours][kChannels][4] = {};
#pragma unroll
    for (int u = 0; u < kTiles; u += 2) {
      uint2 levels[kHalves][kChannels];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        levels_of_tiles(table, codes_of(u, half), codes_of(u + 1, half), lane, levels[half]);
#pragma unroll
      for (int i = 0; i < kChannels; ++i)
#pragma unroll
        for (int four = 0; four < T::kFours; ++four)
          ptx::mma_m16n8k32_s8u8(sums[four][i], levels[0][i].x, levels[1][i].x, levels[0][i].y, levels[1][i].y,
                                 weights[four].columns[u], weights[four].columns[u + 1]);
    }
#pragma unroll
    for (int four = 0; four < T::kFours; ++four)
#pragma unroll
      for (int i = 0; i < kChannels; ++i)
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int(&sum)[4] = sums[four][i];
          float& to = states[four].out[first_block + i][half];
          to = fmaf(static_cast<float>(sum[2 * half] * 256 + sum[2 * half + 1]), factors[four], to);
        }
  };
  if constexpr (Side::kBits == 3) {
#pragma unroll
    for (int pair = 0; pair < kTableUnits / 2; ++pair)
      add_blocks(4 * pair,
                 [&](int u, int half) { return Codes(values + u * Side::side().bytes(), 2 * pair + half, lane); });
  } else {
#pragma unroll
    for (int unit = 0; unit < kTableUnits; ++unit)
      add_blocks(2 * unit, [&](int u, int half) {
        const uint2 words = *reinterpret_cast<const uint2*>(values + u * Side::side().bytes() + unit / 2 * 512 +
                                                            lane * 16 + unit % 2 * 8);
        return Codes(half ? words.y : words.x);
      });
  }
}

}  // namespace kvq::decode
