#pragma once

#include <kvq/runtime/kernels/common/quantize/rows.cuh>

/// Stores codes, scales and minima in pages (formats/pages.md).
namespace kvq::write {

/// Transposes four words of four bytes: out[i] holds byte i of each word.
__device__ __forceinline__ void transpose_bytes(unsigned a, unsigned b, unsigned c, unsigned d, unsigned (&out)[4]) {
  const unsigned ab0 = __byte_perm(a, b, 0x5140), ab1 = __byte_perm(a, b, 0x7362);
  const unsigned cd0 = __byte_perm(c, d, 0x5140), cd1 = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab0, cd0, 0x5410), out[1] = __byte_perm(ab0, cd0, 0x7632);
  out[2] = __byte_perm(ab1, cd1, 0x5410), out[3] = __byte_perm(ab1, cd1, 0x7632);
}

/// Stores the key codes of single tokens. A lane's piece (a quarter of the row, formats/pages.md) is contiguous
/// in vectors of kVectorWords words.
template <typename Side, typename TileOf>
__device__ __forceinline__ void store_single_keys(const unsigned (&words)[2][Side::kWords],
                                                  const std::int64_t (&slot)[2], TileOf tile_of, int lane) {
  constexpr int kVectorWords = Side::kWords % 4 == 0 ? 4 : Side::kWords % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (slot[r] < 0) continue;
    std::byte* tile = tile_of(slot[r]);
    const int token = static_cast<int>(slot[r]) & (kTileTokens - 1);
#pragma unroll
    for (int i = 0; i < Side::kWords; i += kVectorWords) {
      std::byte* to = tile + key_code_offset(Side::side(), token, lane & 3, 4 * i);
      if constexpr (kVectorWords == 4)
        *reinterpret_cast<uint4*>(to) = make_uint4(words[r][i], words[r][i + 1], words[r][i + 2], words[r][i + 3]);
      else if constexpr (kVectorWords == 2)
        *reinterpret_cast<uint2*>(to) = make_uint2(words[r][i], words[r][i + 1]);
      else
        *reinterpret_cast<unsigned*>(to) = words[r][i];
    }
  }
}

/// Stores the value codes of single tokens: the warp takes one token after the other, each lane stores a byte. A
/// word of the tile has one byte of each of four tokens, so one store writes a token's bytes in eight sectors.
template <typename Side, typename TileOf>
__device__ __forceinline__ void store_single_values(const unsigned (&words)[2][Side::kWords],
                                                    const std::int64_t (&slot)[2], TileOf tile_of, int lane) {
  const int piece = lane / 4 % 4, pair_word = lane / 16;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    for (unsigned tokens = __ballot_sync(kAll, slot[r] >= 0) & 0x11111111u; tokens; tokens &= tokens - 1) {
      const int source = __ffs(static_cast<int>(tokens)) - 1;  // lane 4 g
      const std::int64_t at = __shfl_sync(kAll, slot[r], source);
      std::byte* tile = tile_of(at);
      const int token = static_cast<int>(at) & (kTileTokens - 1);
#pragma unroll
      for (int i = 0; i < Side::kWords; i += 2) {
        const int last = i + 1 < Side::kWords ? i + 1 : i;
        const unsigned first = __shfl_sync(kAll, words[r][i], source + piece),
                       second = __shfl_sync(kAll, words[r][last], source + piece);
        const int byte = 4 * (i + pair_word) + lane % 4;
        if (i + pair_word < Side::kWords)
          tile[value_code_offset(Side::side(), token, piece, byte)] =
              static_cast<std::byte>((pair_word ? second : first) >> (8 * (lane % 4)) & 255);
      }
    }
}

/// Gathers the numbers of the tokens g and g + 8. Lane i holds the number of token i, i = 0..15.
__device__ __forceinline__ void of_own_tokens(std::int64_t held, int lane, std::int64_t (&own)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
    own[r] = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(held), (lane >> 2) + 8 * r));
}

/// Stores the codes of the tokens g and g + 8.
/// @param slots    lane i has the destination of token i, i = 0..15; negative: not stored
/// @param tile_of  slot -> first byte of the slot's tile
template <typename Side, typename TileOf>
__device__ __forceinline__ void store_codes(const unsigned (&words)[2][Side::kWords],
                                            const unsigned (&group_params)[2][Side::kGroups], std::int64_t slots,
                                            TileOf tile_of, bool value, int lane) {
  constexpr TileSide kSide{Side::kHeadDim, Side::kBits, Side::kGroup, Side::kGroupParams};
  constexpr int kLaneWords = 2 * Side::kWords, kChunkWords = chunk_bytes(kSide) / 4;
  const int g = lane >> 2, t = lane & 3;
  // If the 16 tokens fill one tile, a lane stores its words in whole chunks.
  const auto tile_slot = static_cast<std::int64_t>(__shfl_sync(kAll, static_cast<long long>(slots), 0));
  const bool in_tile_order = lane >= kTileTokens || slots == tile_slot + lane;
  const bool fills_tile = __all_sync(kAll, in_tile_order) && tile_slot >= 0 && tile_slot % kTileTokens == 0;
  if (fills_tile && (!value || Side::kWords % 2 == 0)) {
    std::byte* tile = tile_of(tile_slot);
    unsigned lane_words[kLaneWords];
    int reader = lane;
    if (value) {
      // Lanes of even and odd g exchange halves; then each lane has one half of four tokens, the words that lane
      // 4 (2 t + half) + g / 2 reads.
      const bool odd = g & 1;
      reader = (2 * t + odd) * 4 + g / 2;
#pragma unroll
      for (int pair = 0; pair < Side::kWords / 2; ++pair) {
        unsigned kept[2], received[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          kept[r] = odd ? words[r][2 * pair + 1] : words[r][2 * pair];
          received[r] = __shfl_xor_sync(kAll, odd ? words[r][2 * pair] : words[r][2 * pair + 1], 4);
        }
        unsigned out[4];
        transpose_bytes(odd ? received[0] : kept[0], odd ? received[1] : kept[1], odd ? kept[0] : received[0],
                        odd ? kept[1] : received[1], out);
#pragma unroll
        for (int i = 0; i < 4; ++i) lane_words[4 * pair + i] = out[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < Side::kWords; ++i) lane_words[i] = words[0][i], lane_words[Side::kWords + i] = words[1][i];
    }
#pragma unroll
    for (int c = 0; c < kLaneWords / kChunkWords; ++c) {
      std::byte* to = tile + (c * 32 + reader) * (kChunkWords * 4);
      if constexpr (kChunkWords == 4)
        *reinterpret_cast<uint4*>(to) =
            make_uint4(lane_words[4 * c], lane_words[4 * c + 1], lane_words[4 * c + 2], lane_words[4 * c + 3]);
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(lane_words[2 * c], lane_words[2 * c + 1]);
    }
#pragma unroll
    for (int group = 0; group < Side::kGroups; ++group) {
      if (t != group % 4) continue;
      std::byte* to = tile + number_offset(kSide, g, group, 0);
      if constexpr (Side::kAffine)
        *reinterpret_cast<uint2*>(to) = make_uint2(group_params[0][group], group_params[1][group]);
      else
        *reinterpret_cast<unsigned*>(to) = group_params[0][group] | group_params[1][group] << 16;
    }
  } else {
    std::int64_t slot[2];
    of_own_tokens(slots, lane, slot);
    if (!value) {
      store_single_keys<Side>(words, slot, tile_of, lane);
    } else if (Side::kWords % 2 && fills_tile) {  // byte stores; neighboring tokens fill the sectors
      std::byte* tile = tile_of(tile_slot);
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int byte = 0; byte < kSide.piece_bytes(); ++byte)
          tile[value_code_offset(kSide, g + 8 * r, t, byte)] =
              static_cast<std::byte>(words[r][byte / 4] >> (8 * (byte % 4)) & 255);
    } else {
      store_single_values<Side>(words, slot, tile_of, lane);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (slot[r] < 0) continue;
      std::byte* tile = tile_of(slot[r]);
      const int token = static_cast<int>(slot[r]) & (kTileTokens - 1);
#pragma unroll
      for (int group = 0; group < Side::kGroups; ++group) {
        if (t != group % 4) continue;
        std::byte* to = tile + number_offset(kSide, token, group, 0);
        if constexpr (Side::kAffine)
          *reinterpret_cast<unsigned*>(to) = group_params[r][group];
        else
          *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(group_params[r][group]);
      }
    }
  }
}

}  // namespace kvq::write
