#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/plan/table_layout.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/device/compare.cuh>
#include <kvq/runtime/kernels/common/quantize/encode.cuh>
#include <kvq/runtime/kernels/common/quantize/store.cuh>

/// Quantizes rows that are one group of codebook codes, bit for bit as packing.md says, and stores them in bit tiles
/// (formats/pages.md). A warp lays its 16 tokens out as a tile in shared memory first, because the bits of a stored
/// word come from four lanes.
namespace kvq::write {

/// The format of one side whose rows are such a group, with an fp16 scale.
template <int kDim, int kBitsArg>
struct CodebookSide {
  static constexpr int kHeadDim = kDim, kBits = kBitsArg, kGroup = kDim, kGroups = 1, kStepsInGroup = kDim / 32;
  static constexpr bool kExact = false, kAffine = false, kBfloat = false, kCodebook = true;
  static_assert(kDim % kUnitChannels == 0 && kBits >= 2 && kBits <= 4);
  KVQ_HD static constexpr TileSide side() { return codebook_tiles(kDim, kBits); }
};
template <typename Side>
concept IsCodebook = requires { requires Side::kCodebook; };

/// Codes of one token's row as bytes: word [j][h] has the channels 32 j + 8 t + 4 h + i of lane t.
template <typename Side>
using CodeBytes = unsigned[Side::kHeadDim / 32][2];

/// Quantizes a token's row. All lanes of the warp call it. @param x  becomes x / scale
/// @param table   [2^b] entries, then [2^b - 1] thresholds
/// @param rule    norm or rms
/// @param finite  whether all channels are, else the row is poisoned
/// @return        bits of the scale
template <typename Side>
__device__ __forceinline__ unsigned encode_codebook(float (&x)[Side::kHeadDim / 32][8], const float* table,
                                                    ScaleRule rule, bool finite, CodeBytes<Side>& codes) {
  constexpr int kSteps = Side::kHeadDim / 32, kEntries = 1 << Side::kBits;
  const float energy = tree_sum<Side>(0, [&](int j, int e) { return __fmul_rn(x[j][e], x[j][e]); });
  unsigned short rms_bits, norm_bits;
  const float scale = stored<Side::kBfloat>(__fsqrt_rn(__fdiv_rn(energy, static_cast<float>(Side::kGroup))), rms_bits);
  const float reciprocal = scale > 0.0f ? __frcp_rn(scale) : 0.0f;
#pragma unroll
  for (int j = 0; j < kSteps; ++j)
#pragma unroll
    for (int e = 0; e < 8; ++e) x[j][e] = divide(x[j][e], scale, reciprocal);
  // Codes are counted in the low bits of floats, because additions of floats leave the pipe of comparisons free.
  constexpr float kMagic = 8388608.0f;  // 2^23
  float counts[kSteps][8];
#pragma unroll
  for (int i = 0; i < kEntries - 1; ++i) {
    const float threshold = __ldg(table + kEntries + i);
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (i == 0) counts[j][e] = kMagic;
        counts[j][e] += ptx::at_least(x[j][e], threshold);
      }
  }
  const auto code_of = [&](int j, int e) { return __float_as_uint(counts[j][e]); };
#pragma unroll
  for (int j = 0; j < kSteps; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      codes[j][h] = __byte_perm(__byte_perm(code_of(j, 4 * h), code_of(j, 4 * h + 1), 0x0040),
                                __byte_perm(code_of(j, 4 * h + 2), code_of(j, 4 * h + 3), 0x0040), 0x5410);
  const float n = tree_sum<Side>(0, [&](int j, int e) {
    const float level = __ldg(table + (code_of(j, e) & 0xFFu));
    return __fmul_rn(level, level);
  });
  stored<Side::kBfloat>(__fsqrt_rn(__fdiv_rn(energy, n)), norm_bits);
  if (finite && scale > 0.0f) return rule == ScaleRule::norm && n > 0.0f ? norm_bits : rms_bits;
#pragma unroll
  for (auto& words : codes) words[0] = words[1] = finite ? 0x01010101u << (Side::kBits - 1) : 0u;
  return finite ? 0u : 0x7E00u;
}

/// Bits `bit` of a word of four codes, as its four lowest bits.
__device__ __forceinline__ unsigned plane_of(unsigned codes, int bit) {
  return (codes >> bit & 0x01010101u) * 0x01020408u >> 24;
}
/// The two lowest bits of four codes, as a byte.
__device__ __forceinline__ unsigned pairs_of(unsigned codes) { return (codes & 0x03030303u) * 0x01041040u >> 24; }

/// Stores a lane's part of a row in the tile in shared memory. @param token  of the tile
template <typename Side>
__device__ __forceinline__ void lay_out(const CodeBytes<Side>& codes, unsigned scale, std::byte* tile, int token,
                                        bool value, int t) {
  constexpr TileSide kSide = Side::side();
  constexpr int kBits = Side::kBits;
  const auto put = [&](int offset, unsigned byte) { tile[offset] = static_cast<std::byte>(byte & 0xFFu); };
#pragma unroll
  for (int j = 0; j < Side::kHeadDim / 32; ++j) {
    const unsigned low = codes[j][0], high = codes[j][1];
    if (!value) {
#pragma unroll
      for (int i = 0; i < kBits; ++i)
        put(key_word_offset(kSide, token, j * kBits + i) + t, plane_of(low, i) | plane_of(high, i) << 4);
      continue;
    }
    const auto put_value = [&](int byte, unsigned x) { put(value_byte_offset(kSide, token, 4 * kBits * j + byte), x); };
    if constexpr (kBits == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned four = h ? high : low, two = four | four >> 4;
        put_value(4 * t + 2 * h, two), put_value(4 * t + 2 * h + 1, two >> 16);
      }
    } else {
      put_value(2 * t, pairs_of(low)), put_value(2 * t + 1, pairs_of(high));
      if constexpr (kBits == 3) put_value(8 + t, plane_of(low, 2) | plane_of(high, 2) << 4);
    }
  }
  if (t == 0)
    *reinterpret_cast<unsigned short*>(tile + number_offset(kSide, token, 0, 0)) = static_cast<unsigned short>(scale);
}

/// Stores a tile from shared memory where its tokens go. All lanes of the warp call it.
/// @param slots    lane i has the destination of token i, i = 0..15; negative: not stored
/// @param tile_of  slot -> first byte of the slot's tile
template <typename Side, typename TileOf>
__device__ __forceinline__ void store_tile(const std::byte* tile, std::int64_t slots, TileOf tile_of, bool value,
                                           int lane) {
  constexpr TileSide kSide = Side::side();
  static_assert(kSide.bytes() % 16 == 0);
  const auto first = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(slots), 0));
  const bool in_tile_order = lane >= kTileTokens || slots == first + lane;
  if (__all_sync(kAll, in_tile_order) && first >= 0 && first % kTileTokens == 0) {
    const auto* from = reinterpret_cast<const uint4*>(tile);
    auto* to = reinterpret_cast<uint4*>(tile_of(first));
#pragma unroll
    for (int i = 0; i < kSide.bytes() / 16; i += 32)
      if (i + lane < kSide.bytes() / 16) to[i + lane] = from[i + lane];
    return;
  }
#pragma unroll 1
  for (int token = 0; token < kTileTokens; ++token) {
    const auto slot = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(slots), token));
    if (slot < 0) continue;
    std::byte* to = tile_of(slot);
    const int at = static_cast<int>(slot) & (kTileTokens - 1);
    if (value) {
      for (int y = lane; y < 4 * kSide.row_words; y += 32)
        to[value_byte_offset(kSide, at, y)] = tile[value_byte_offset(kSide, token, y)];
    } else if (lane < kSide.row_words) {
      *reinterpret_cast<unsigned*>(to + key_word_offset(kSide, at, lane)) =
          *reinterpret_cast<const unsigned*>(tile + key_word_offset(kSide, token, lane));
    }
    if (lane == 0)
      *reinterpret_cast<unsigned short*>(to + number_offset(kSide, at, 0, 0)) =
          *reinterpret_cast<const unsigned short*>(tile + number_offset(kSide, token, 0, 0));
  }
}

/// Quantizes one warp's rows and stores them in pages.
/// @param code     of the side
/// @param scratch  room for a tile, aligned to 16 bytes; what lanes read there before may be overwritten
template <typename Side, typename TileOf>
__device__ __forceinline__ void quantize_codebook_rows(Rows<Side>& rows, const RowCode& code, ScaleRule rule, int head,
                                                       std::int64_t slots, TileOf tile_of, bool value,
                                                       std::byte* scratch, int lane) {
  const float* table = code.tables + __ldg(&code.heads[head].segments[0].table);
  __syncwarp();
  auto& x = rows.x[0];
#pragma unroll 1  // so that the code stays in the instruction cache
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) x[j][e] = (r == 0 ? x[j][e] : rows.x[1][j][e]) * rows.row_scale;
    CodeBytes<Side> codes;
    const bool finite = is_finite_row(x);
    const unsigned scale = encode_codebook<Side>(x, table, rule, finite, codes);
    lay_out<Side>(codes, scale, scratch, lane / 4 + 8 * r, value, lane & 3);
  }
  __syncwarp();
  store_tile<Side>(scratch, slots, tile_of, value, lane);
  __syncwarp();
}

}  // namespace kvq::write
