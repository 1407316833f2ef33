#pragma once

#include <cstdint>

/// Byte arithmetic of paged rows (formats/pages.md), in constexpr integers, for host and device. Nothing else computes
/// an offset inside a page.
#ifdef __CUDACC__
#define KVQ_HD __host__ __device__
#else
#define KVQ_HD
#endif

namespace kvq {

constexpr int kTileTokens = 16;  ///< tokens of a tile; a page has whole tiles

/// Size of the chunks of an exact (bfloat16) row that exact_offset() exchanges.
constexpr int kExactChunkBytes = 16;

/// Format of the tiles of one side: `bits` for each channel, and for each group a 16-bit scale with or without a 16-bit
/// minimum. A tile holds 16 tokens of one KV head: first the codes, then the scales and minima.
struct TileSide {
  int head_dim = 128;
  int bits = 2;          ///< 2 or 4; 16 = exact rows
  int group_size = 128;  ///< channels that share a scale; a multiple of 32 that divides head_dim
  int numbers = 2;       ///< per group: 2 for scale and minimum, 1 for the scale alone, 0 for exact rows

  KVQ_HD constexpr bool exact() const { return bits == 16; }
  /// Bytes of a piece. Four lanes share a row: lane t holds the channels 32 j + 8 t + e with e = 0..7, its piece of the
  /// row; see code_place().
  KVQ_HD constexpr int piece_bytes() const { return head_dim * bits / 32; }
  KVQ_HD constexpr int codes_per_byte() const { return 8 / bits; }
  KVQ_HD constexpr int words() const { return piece_bytes() / 4; }
  KVQ_HD constexpr int groups() const { return exact() ? 0 : head_dim / group_size; }
  KVQ_HD constexpr int code_bytes() const {
    return exact() ? kTileTokens * head_dim * 2 : kTileTokens * 4 * piece_bytes();
  }
  KVQ_HD constexpr int number_bytes() const { return kTileTokens * groups() * numbers * 2; }
  KVQ_HD constexpr int bytes() const { return code_bytes() + number_bytes(); }
};

/// Where a channel's code lies in its row's four pieces.
struct CodePlace {
  int lane = 0;   ///< t, 0..3
  int byte = 0;   ///< of the piece, 0 .. piece_bytes - 1
  int slice = 0;  ///< code at bits [slice * bits, (slice + 1) * bits) of the byte
};

/// Channel 32 j + 8 t + 4 w + i lies in lane t, byte i of a word. Step j of 32 channels takes the same slice of two
/// neighboring words. If the number of words is odd, the last word holds the remaining steps j' = 0, 1, ... alone, at
/// slices 2 j' + w.
KVQ_HD constexpr CodePlace code_place(const TileSide& side, int channel) {
  const int j = channel / 32, t = channel / 8 % 4, w = channel / 4 % 2, i = channel % 4;
  const int per_byte = side.codes_per_byte(), paired = side.words() / 2 * per_byte;
  if (j < paired) return {t, (j / per_byte * 2 + w) * 4 + i, j % per_byte};
  return {t, (side.words() - 1) * 4 + i, (j - paired) * 2 + w};
}

/// Inverse of code_place().
KVQ_HD constexpr int code_channel(const TileSide& side, const CodePlace& place) {
  const int word = place.byte / 4, per_byte = side.codes_per_byte(), pairs = side.words() / 2;
  const bool paired = word < 2 * pairs;
  const int step = paired ? word / 2 * per_byte + place.slice : pairs * per_byte + place.slice / 2;
  return 32 * step + 8 * place.lane + 4 * (paired ? word % 2 : place.slice % 2) + place.byte % 4;
}

/// A lane reads the pieces of two rows, one after the other, in chunks of this size. A tile stores chunk c of all 32
/// lanes before chunk c + 1.
KVQ_HD constexpr int chunk_bytes(const TileSide& side) { return side.piece_bytes() % 8 == 0 ? 16 : 8; }

KVQ_HD constexpr int chunk_offset(const TileSide& side, int lane, int byte) {
  // Both chunk sizes are written out, so that every divisor is known at compile time.
  return chunk_bytes(side) == 16 ? byte / 16 * 512 + lane * 16 + byte % 16 : byte / 8 * 256 + lane * 8 + byte % 8;
}

/// Offset in the tile of one byte of a key's piece. Lane 4 g + t of a warp reads piece t of the tokens g and g + 8.
KVQ_HD constexpr int key_code_offset(const TileSide& side, int token, int lane, int byte) {
  return chunk_offset(side, token % 8 * 4 + lane, token / 8 * side.piece_bytes() + byte);
}

/// Half of a value's piece that a byte belongs to, and the byte's index in that half. Of the two words of a step the
/// first belongs to half 0, the second to half 1. If the number of words is odd, two bytes of the last word belong to
/// each half.
struct ValueByte {
  int half = 0;
  int index = 0;  ///< 0 .. piece_bytes / 2 - 1
};
KVQ_HD constexpr ValueByte value_byte(const TileSide& side, int byte) {
  const int paired = side.words() / 2 * 8;
  if (byte < paired) return {byte / 4 % 2, byte / 8 * 4 + byte % 4};
  return {byte % 4 / 2, paired / 2 + byte % 2};
}

/// Offset in the tile of one byte of a value's piece. A word holds one byte of four tokens. Lane 4 r + u of a warp
/// reads half r mod 2 of piece r div 2 of the tokens 2 u + (i >> 1) + 8 (i & 1), i = 0..3.
KVQ_HD constexpr int value_code_offset(const TileSide& side, int token, int lane, int byte) {
  const ValueByte place = value_byte(side, byte);
  return chunk_offset(side, (2 * lane + place.half) * 4 + token % 8 / 2, place.index * 4 + token % 2 * 2 + token / 8);
}

/// Offset in the tile of a scale (`number` 0) or a minimum (1): behind the codes, group by group. Tokens r and r + 8
/// lie side by side.
KVQ_HD constexpr int number_offset(const TileSide& side, int token, int group, int number) {
  return side.code_bytes() + (((group * 8 + token % 8) * 2 + token / 8) * side.numbers + number) * 2;
}

/// Offset in the tile of a channel of an exact row. If 64 divides head_dim, each run of eight 16-byte chunks is
/// exchanged: chunk c of token r lies at c xor (r mod 8), so that the same chunk of eight rows lies in different
/// shared-memory banks.
KVQ_HD constexpr int exact_offset(int head_dim, int token, int channel) {
  const int chunk = channel / 8, swapped = (chunk & ~7) | ((chunk ^ token) & 7);
  return token * head_dim * 2 + (head_dim % 64 ? chunk : swapped) * kExactChunkBytes + channel % 8 * 2;
}

/// Permuted channel of a value's channel. A reader multiplies blocks of 16 channels: permuted channel 16 b + r is row r
/// of block b. The exact windows store values in this order, so that quantized and exact tokens add up in the same
/// registers.
KVQ_HD constexpr int value_place(const TileSide& side, int channel) {
  if (side.exact()) return channel;
  const CodePlace code = code_place(side, channel);
  const ValueByte byte = value_byte(side, code.byte);
  return (byte.index / 2 * side.codes_per_byte() + code.slice) * 16 + byte.index % 2 * 8 + 2 * code.lane + byte.half;
}

/// The step of 32 channels that a block of 16 value rows belongs to; its group is step / (group_size / 32).
KVQ_HD constexpr int value_step(const TileSide& side, int block) {
  const int h = block / side.codes_per_byte(), slice = block % side.codes_per_byte(), pairs = side.words() / 2;
  return h < 2 * pairs ? h / 2 * side.codes_per_byte() + slice : pairs * side.codes_per_byte() + slice / 2;
}

/// Inverse of value_place().
KVQ_HD constexpr int value_channel(const TileSide& side, int place) {
  if (side.exact()) return place;
  const int block = place / 16, row = place % 16, h = block / side.codes_per_byte(),
            slice = block % side.codes_per_byte();
  const int channel = 32 * value_step(side, block) + row % 8 / 2 * 8;
  return h < side.words() / 2 * 2 ? channel + row % 2 * 4 + h % 2 * 2 + row / 8
                                  : channel + slice % 2 * 4 + row % 2 * 2 + row / 8;
}

/// One layer's quantized pages: [pages][num_kv_heads], and for each head the key tiles, then the value tiles.
struct PageLayout {
  TileSide k, v;
  int num_kv_heads = 0;
  int page_size = 64;  ///< tokens: 16, 32, 64 or 128
  KVQ_HD constexpr int tiles() const { return page_size / kTileTokens; }
  KVQ_HD constexpr int head_bytes() const { return tiles() * (k.bytes() + v.bytes()); }
  KVQ_HD constexpr std::int64_t page_bytes() const { return std::int64_t{num_kv_heads} * head_bytes(); }
  /// First byte, inside its page, of the tile that holds the token `slot` of one head.
  KVQ_HD constexpr int key_tile(int head, int slot) const {
    return head * head_bytes() + slot / kTileTokens * k.bytes();
  }
  KVQ_HD constexpr int value_tile(int head, int slot) const {
    return head * head_bytes() + tiles() * k.bytes() + slot / kTileTokens * v.bytes();
  }
};

/// One layer's pool of exact rows, of sinks or of rings: [slots][num_kv_heads][rows / 16 tiles], each tile K then V.
/// Row `position mod rows` of a slot holds a position's exact row (formats/pages.md, "Exact windows").
struct WindowLayout {
  int num_kv_heads = 0;
  TileSide k{128, 16, 128, 0}, v{128, 16, 128, 0};
  TileSide coded_v{128, 16, 128, 0};  ///< format of quantized values: value_place() of it orders the channels
  int rows = 0;                       ///< of a slot: whole tiles
  KVQ_HD constexpr int tile_bytes() const { return k.bytes() + v.bytes(); }
  KVQ_HD constexpr int tiles() const { return rows / kTileTokens; }
  KVQ_HD constexpr std::int64_t head_bytes() const { return std::int64_t{tiles()} * tile_bytes(); }
  KVQ_HD constexpr std::int64_t slot_bytes() const { return num_kv_heads * head_bytes(); }
  KVQ_HD constexpr int row(std::int64_t position) const { return static_cast<int>(position % rows); }
  /// First byte of the K and V tiles of one head that hold row `pool_row` = slot * rows + row of the pool.
  KVQ_HD constexpr std::int64_t tile_pair(std::int64_t pool_row, int head) const {
    const auto tile = static_cast<unsigned>(pool_row / kTileTokens), each = static_cast<unsigned>(tiles());
    return tile / each * slot_bytes() + head * head_bytes() + std::int64_t{tile % each} * tile_bytes();
  }
  /// Byte of a key's channel inside its head's tiles.
  KVQ_HD constexpr int key_offset(int row, int channel) const {
    return row / kTileTokens * tile_bytes() + exact_offset(k.head_dim, row % kTileTokens, channel);
  }
  KVQ_HD constexpr int value_offset(int row, int channel) const {
    return row / kTileTokens * tile_bytes() + k.bytes() +
           exact_offset(v.head_dim, row % kTileTokens, value_place(coded_v, channel));
  }
};

}  // namespace kvq
