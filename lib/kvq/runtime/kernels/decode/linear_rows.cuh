#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/stages.cuh>

/// What differs in four_rows.cuh if rows are linear (LinearSideTraits): x = s M b, with bits b of +1/2 and -1/2.
///
/// Keys: q . x = s (q' . b) with q' = q M, which the queries kernel has cut into integers of kPlanes bits. Plane by
/// plane they are the second operand of binary products, which count bits that are set in both: two planes of each of
/// four rows are the eight columns. The words of keys are the first operand as they lie in the tile, 256 bits of 16
/// tokens at once. Lane 4 g + t gets for row t the counts of tokens g and g + 8, in columns 2 t (of the lower plane)
/// and 2 t + 1.
///
/// Values: each byte of a word has eight bits of one token, and a mask leaves one of them, times a power of two.
/// Accumulators are the sums of weights of bits, not of channels: 16 rows of a product are the same bit of 16
/// neighboring bytes of the row (bit_of_place()).
namespace kvq::decode {

/// An integer from 0 to 2^24, times 2^-149: a float that is so small has its bits. Sums of such floats are as exact as
/// those of integers, take half the time, and need no conversion.
__device__ __forceinline__ float tiny_of(int count) { return __int_as_float(count); }
/// A tiny number times kFromTiny is the integer times kTinyUnit. (No float is 2^149.)
constexpr float kFromTiny = 0x1p126f, kTinyUnit = 0x1p-23f;

/// The product of a token's bits with the integers of a query, of the counts of its planes; tiny.
/// @param i  0 for token g, 1 for g + 8
template <int kPlanePairs>
__device__ __forceinline__ float product_of_counts(const int (&counts)[kPlanePairs][4], int i) {
  float product = 0.0f;
#pragma unroll
  for (int p = 0; p < kPlanePairs; ++p) {
    const float low = static_cast<float>(1 << (2 * p)), high = p == kPlanePairs - 1 ? -2.0f : 2.0f;  // -: the sign
    product = fmaf(tiny_of(counts[p][2 * i + 1]), high * low, fmaf(tiny_of(counts[p][2 * i]), low, product));
  }
  return product;
}
/// A token's score, in multiples of the query's `score_scale`.
/// @param product   product_of_counts()
/// @param scale     of the row
/// @param half_sum  half the sum of q', which a bit of 0 leaves out, times kTinyUnit
__device__ __forceinline__ float score_of_product(float product, float scale, float half_sum) {
  return scale * (1.0f / kTinyUnit) * fmaf(product, kFromTiny, -half_sum);
}

/// Scores of a tile's tokens g and g + 8 for row t, in multiples of the query's `score_scale`.
/// @param fragment  planes of the queries: of each chunk kPlanes / 2 pairs
/// @param half_sum  score_of_product()
template <typename T>
__device__ __forceinline__ void linear_scores(const unsigned char* tile, const unsigned (&fragment)[T::kSteps][2],
                                              float half_sum, int lane, float& score0, float& score1) {
  using Side = typename T::KSide;
  static_assert(!Side::kBfloat);  // such scales may be too large for score_of_product()
  constexpr int kPlanePairs = T::kPlanes / 2;
  int counts[kPlanePairs][4] = {};
#pragma unroll
  for (int c = 0; c < Side::kChunks; ++c) {
    const auto& planes = &fragment[c * kPlanePairs];
    if (c < Side::kLongChunks) {
      const uint4 a = *reinterpret_cast<const uint4*>(tile + c * 512 + lane * 16);
#pragma unroll
      for (int p = 0; p < kPlanePairs; ++p)
        ptx::mma_m16n8k256_b1(counts[p], a.x, a.y, a.z, a.w, planes[p][0], planes[p][1]);
    } else {
      // Words of lanes behind the row are zero here, as those of the query are.
      uint2 four = {}, rest = {};
      if constexpr (Side::kFour) four = *reinterpret_cast<const uint2*>(tile + c * 512 + lane * 8);
      if (const int g = lane >> 2, t = lane & 3; t < Side::kRest)
        rest = *reinterpret_cast<const uint2*>(tile + Side::kRestAt + (g * Side::kRest + t) * 8);
      const uint2 a = Side::kFour ? four : rest;
#pragma unroll
      for (int p = 0; p < kPlanePairs; ++p)
        if constexpr (Side::kFour && Side::kRest > 0)
          ptx::mma_m16n8k256_b1(counts[p], a.x, a.y, rest.x, rest.y, planes[p][0], planes[p][1]);
        else
          ptx::mma_m16n8k128_b1(counts[p], a.x, a.y, planes[p][0]);
    }
  }
  const GroupParams<Side> params(tile, 0, lane >> 2);
  float scores[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) scores[i] = score_of_product(product_of_counts(counts, i), params.scale[i], half_sum);
  score0 = scores[0], score1 = scores[1];
}

/// Sums of weights are kept times kSumUnit: then kTinyToSum, the factor of tiny numbers, is a float.
constexpr float kSumUnit = 0x1p-40f, kTinyToSum = 0x1p109f;

/// Adds weights of a stage's tokens to sums for each byte of the row. A mask leaves one bit of each byte of a word, so
/// sums[8 h + k] sums up 2^k times bit k. Two masks are saved: the sums k = 0 and 7 are those of the whole byte, as an
/// unsigned and as a signed number. finish_linear_values() makes sums of bits of them.
/// @param values  tiles
/// @param weights  of each four rows
/// @param states   FourRowsState of each four rows
template <typename T, typename State>
__device__ __forceinline__ void add_linear_values(const unsigned char* values,
                                                  const StageWeights<T> (&weights)[T::kFours], int lane,
                                                  State (&states)[T::kFours]) {
  using Side = typename T::VSide;
  static_assert(!Side::kBfloat);  // weights with such scales may be too large for kTinyToSum
  constexpr int kTiles = T::kStageTiles;
#pragma unroll
  for (int h = 0; h < Side::kPairs; ++h) {
    // Two words of a tile at a time: with those of another tile they are a whole operand, in neighboring registers. One
    // load of all four words, which the compiler would make of two, needs moves.
    const bool is_long = h < 2 * Side::kLongChunks;
    const unsigned char* from =
        values + h / 2 * 512 + (is_long ? lane * 16 + (h % 2 ? static_cast<int>(ptx::copied(8)) : 0) : lane * 8);
    const bool is_rest = Side::kRest > 0 && h == Side::kPairs - 1;
    const int rows = is_rest && Side::kRest <= 2 ? 1 : 2;  // of the pair, that any lane has
    uint2 words[kTiles];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (is_rest) {
        const unsigned char* rest = values + u * Side::side().bytes() + Side::kRestAt + lane * 4;
        words[u] = {};
        if ((lane >> 2) < 4 * Side::kRest) words[u].x = *reinterpret_cast<const unsigned*>(rest);
        if ((lane >> 2) + 8 < 4 * Side::kRest) words[u].y = *reinterpret_cast<const unsigned*>(rest + 128);
      } else {
        words[u] = *reinterpret_cast<const uint2*>(from + u * Side::side().bytes());
      }
    }
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const unsigned mask = bit == 0 || bit == 7 ? ~0u : 0x01010101u << bit;
      int sums[T::kFours][4] = {};
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        const uint2 &first = words[2 * pair], &second = words[2 * pair + 1];
#pragma unroll
        for (int four = 0; four < T::kFours; ++four) {
          const auto& columns = weights[four].columns;
          if (bit == 7)
            ptx::mma_m16n8k32_s8u8(sums[four], first.x, first.y, second.x, second.y, columns[2 * pair],
                                   columns[2 * pair + 1]);
          else
            ptx::mma_m16n8k32_u8u8(sums[four], first.x & mask, first.y & mask, second.x & mask, second.y & mask,
                                   columns[2 * pair], columns[2 * pair + 1]);
        }
      }
#pragma unroll
      for (int four = 0; four < T::kFours; ++four) {
        float(&to)[2] = states[four].out[8 * h + bit];
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          const int high = sums[four][2 * i], low = sums[four][2 * i + 1];
          if (bit == 7)  // signed
            to[i] = fmaf(static_cast<float>(high * 256 + low), weights[four].scale * kSumUnit, to[i]);
          else
            to[i] = fmaf(fmaf(tiny_of(high), 256.0f, tiny_of(low)), weights[four].scale * kTinyToSum, to[i]);
        }
      }
    }
  }
}

/// Makes sums of bits, each +1/2 or -1/2, of those that add_linear_values() leaves.
/// @param half  half the sum of weights
template <typename T>
__device__ __forceinline__ void finish_linear_values(float (&out)[T::kSumBlocks][2], float half) {
#pragma unroll
  for (int h = 0; h < T::VSide::kPairs; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto sum = [&](int bit) -> float& { return out[8 * h + bit][i]; };
      sum(7) = (sum(0) - sum(7)) * (1.0f / 2.0f);  // 2^7 bit 7: a signed byte is 2^8 smaller where it is set
#pragma unroll
      for (int bit = 1; bit < 8; ++bit) sum(0) -= sum(bit);
#pragma unroll
      for (int bit = 0; bit < 8; ++bit)
        sum(bit) = fmaf(sum(bit), 1.0f / kSumUnit / static_cast<float>(1 << bit), -half);
    }
}

}  // namespace kvq::decode
