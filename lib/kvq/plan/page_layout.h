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

/// Format of the tiles of one side. A tile holds 16 tokens of one KV head: first the codes, then the numbers, then the
/// indices of centroids. Code tiles have `bits` for each channel, and for each group a scale with or without a minimum
/// or zero point. Bit tiles have rows of any widths, `row_words` words each.
struct TileSide {
  int head_dim = 128;
  int bits = 2;          ///< 2, 3 or 4; 16 = exact rows; 0 = bit tiles
  int group_size = 128;  ///< channels that share a scale; a multiple of 32 that divides head_dim; bit tiles: head_dim
  int numbers = 2;       ///< per group: 2 for scale and minimum or zero point, 1 for the scale alone, 0 exact rows;
                         ///< bit tiles: of a row
  int number_size = 2;   ///< bytes of a number: 2, or 4 for fp32
  bool integer_zero = false;  ///< the second number is a zero point, so x = (code - zero) * scale
  int row_words = 0;          ///< bit tiles: words of 32 bits of a row
  int index_bytes = 0;        ///< of the index of a token's centroid: 0, 1 or 2
  int table_bits = 0;         ///< bit tiles: 3 or 4 if rows are one group of codebook codes that tuned kernels read
                              ///< (table_rows.h: a codebook with levels), else 0. No place depends on it.
  bool segments = false;      ///< bit tiles: keys are segments of codebook codes that tuned kernels read
                              ///< (segment_rows.h). No place depends on it.

  KVQ_HD constexpr bool exact() const { return bits == 16; }
  KVQ_HD constexpr bool is_bits() const { return bits == 0; }
  /// Bytes of a piece. Four lanes share a row: lane t holds the channels 32 j + 8 t + e with e = 0..7, its piece of the
  /// row; see code_place() and code_parts().
  KVQ_HD constexpr int piece_bytes() const { return head_dim * bits / 32; }
  KVQ_HD constexpr int codes_per_byte() const { return 8 / bits; }  ///< not of three bits, whose codes cross bytes
  KVQ_HD constexpr int units() const { return head_dim / 128; }     ///< of three bits: four steps of 32 channels
  KVQ_HD constexpr int words() const { return piece_bytes() / 4; }
  KVQ_HD constexpr int groups() const { return exact() ? 0 : head_dim / group_size; }
  KVQ_HD constexpr int code_bytes() const {
    if (is_bits()) return kTileTokens * 4 * row_words;
    return exact() ? kTileTokens * head_dim * 2 : kTileTokens * 4 * piece_bytes();
  }
  KVQ_HD constexpr int number_bytes() const { return kTileTokens * groups() * numbers * number_size; }
  KVQ_HD constexpr int bytes() const { return code_bytes() + number_bytes() + kTileTokens * index_bytes; }
};

/// Where a channel's code of 2 or 4 bits lies in its row's four pieces.
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

/// Bits [shift, shift + width) of a byte of a piece. Width 0: nothing.
struct BitField {
  int byte = 0, shift = 0, width = 0;
};

/// Where a channel's code of any width lies: `low` has its first bits, `high` those behind them. Only every fourth step
/// of three bits has a `high`.
struct CodeParts {
  int lane = 0;  ///< t, 0..3
  BitField low = {}, high = {};
};

/// Three bits: the steps 4 n .. 4 n + 3 of unit n share a pair of words, which has eight bits for each channel of a
/// step, and a half word w = 0, 1 of a third one, which has four. Of the step 4 n + 2 the pair has the two low bits.
KVQ_HD constexpr CodeParts code_parts(const TileSide& side, int channel) {
  if (side.bits != 3) {
    const CodePlace place = code_place(side, channel);
    return {place.lane, {place.byte, place.slice * side.bits, side.bits}, {}};
  }
  const int n = channel / 128, step = channel / 32 % 4, t = channel / 8 % 4, w = channel / 4 % 2, i = channel % 4;
  const int pair = (2 * n + w) * 4 + i, single = (2 * side.units() + n) * 4 + i;
  if (step == 3) return {t, {single, 4 * w, 3}, {}};
  if (step == 2) return {t, {pair, 6, 2}, {single, 4 * w + 3, 1}};
  return {t, {pair, 3 * step, 3}, {}};
}

/// The bits [first, first + width) of a channel's code, at bits [shift, shift + width) of a byte.
struct BytePart {
  int channel = 0, first = 0, shift = 0, width = 0;
};
/// Number of codes that a byte of a piece has bits of.
KVQ_HD constexpr int parts_of_byte(const TileSide& side, int byte) {
  if (side.bits != 3) return side.codes_per_byte();
  return byte < 8 * side.units() ? 3 : 4;
}
/// Inverse of code_parts(). @param part  0 .. parts_of_byte() - 1
KVQ_HD constexpr BytePart byte_part(const TileSide& side, int lane, int byte, int part) {
  if (side.bits != 3) return {code_channel(side, {lane, byte, part}), 0, part * side.bits, side.bits};
  const int word = byte / 4, in_step = 8 * lane + byte % 4;
  if (word < 2 * side.units())
    return {32 * (word / 2 * 4 + part) + word % 2 * 4 + in_step, 0, 3 * part, part == 2 ? 2 : 3};
  const int first_step = 4 * (word - 2 * side.units()), w = part / 2;
  if (part % 2) return {32 * (first_step + 2) + 4 * w + in_step, 2, 4 * w + 3, 1};
  return {32 * (first_step + 3) + 4 * w + in_step, 0, 4 * w, 3};
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
/// each half. Of three bits two bytes of every word do, so that both parts of a code are in one half.
struct ValueByte {
  int half = 0;
  int index = 0;  ///< 0 .. piece_bytes / 2 - 1
};
KVQ_HD constexpr ValueByte value_byte(const TileSide& side, int byte) {
  if (side.bits == 3) return {byte % 4 / 2, byte / 4 * 2 + byte % 2};
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

/// Offset in the tile of a scale (`number` 0) or a minimum or zero point (1): behind the codes, group by group. Tokens
/// r and r + 8 lie side by side.
KVQ_HD constexpr int number_offset(const TileSide& side, int token, int group, int number) {
  return side.code_bytes() + (((group * 8 + token % 8) * 2 + token / 8) * side.numbers + number) * side.number_size;
}

/// Offset in the tile of the index of a token's centroid.
KVQ_HD constexpr int index_offset(const TileSide& side, int token) {
  return side.code_bytes() + side.number_bytes() + (2 * (token % 8) + token / 8) * side.index_bytes;
}

// ---- Bit tiles ---------------------------------------------------------------------------------------------------

/// Where the bits of a code lie in a row of bits.
struct BitSegment {
  int bits = 0;           ///< of a code
  int first_channel = 0;  ///< of the segment
  int channels = 0;
  int first_bit = 0;  ///< of the segment in the row
};

constexpr int kUnitChannels = 32;  ///< neighboring channels of a segment whose bits lie together

/// Place in the row of bit `bit` of a key's code: in a unit all lowest bits come first, then all bits 1, and so on.
/// @param channel  in the segment
KVQ_HD constexpr int key_bit(const BitSegment& segment, int channel, int bit) {
  const int unit = channel / kUnitChannels * kUnitChannels, rest = segment.channels - unit;
  return segment.first_bit + unit * segment.bits + bit * (rest < kUnitChannels ? rest : kUnitChannels) + channel - unit;
}

/// The field [first, first + width) of a value's code that has the bit `bit`: codes are cut into fields of 8, 4, 2 and
/// 1 bits, the widest one lowest.
struct CodeField {
  int first = 0, width = 0;
};
KVQ_HD constexpr CodeField code_field(int bits, int bit) {
  int first = 0;
  for (int width = 8; width > 1; width /= 2) {
    if (!(bits & width)) continue;
    if (bit < first + width) return {first, width};
    first += width;
  }
  return {first, 1};
}

/// Place in the row of bit `bit` of a value's code. @param channel  in the segment
KVQ_HD constexpr int value_bit(const BitSegment& segment, int channel, int bit) {
  const int unit = channel / kUnitChannels * kUnitChannels, rest = segment.channels - unit;
  const CodeField field = code_field(segment.bits, bit);
  return segment.first_bit + unit * segment.bits + field.first * (rest < kUnitChannels ? rest : kUnitChannels) +
         (channel - unit) * field.width + bit - field.first;
}

/// Rows are cut into chunks of eight words, then at most one of four, then the rest. Words before that rest.
KVQ_HD constexpr int chunked_words(const TileSide& side) { return side.row_words / 4 * 4; }

/// Offset in a key tile of a word of a token's row.
KVQ_HD constexpr int key_word_offset(const TileSide& side, int token, int word) {
  const int row = token % 8, half = token / 8, eights = side.row_words / 8 * 8, chunked = chunked_words(side);
  if (word < eights) return word / 8 * 512 + (4 * row + word % 8 / 2) * 16 + word % 2 * 8 + half * 4;
  if (word < chunked) return eights * 64 + (4 * row + word - eights) * 8 + half * 4;
  return chunked * 64 + (row * (side.row_words - chunked) + word - chunked) * 8 + half * 4;
}

/// Offset in a value tile of a byte of a token's row.
KVQ_HD constexpr int value_byte_offset(const TileSide& side, int token, int byte) {
  const int lane = token % 8 / 2, in_word = 2 * (token % 2) + token / 8;
  const int eights = side.row_words / 8 * 32, chunked = chunked_words(side) * 4;  // bytes
  if (byte < eights) return byte / 32 * 512 + (4 * (byte % 8) + lane) * 16 + byte % 32 / 8 * 4 + in_word;
  if (byte < chunked) {
    const int y = byte - eights;
    return eights * 16 + (4 * (y % 8) + lane) * 8 + y / 8 * 4 + in_word;
  }
  return chunked * 16 + (4 * (byte - chunked) + lane) * 4 + in_word;
}

/// A reader of values multiplies blocks of 16 bytes of a row, bit by bit: place 16 (8 a + k) + r is bit k of byte
/// 16 a + r. @return  the bit of the row at a place
KVQ_HD constexpr int value_bit_of_place(int place) { return (place / 128 * 16 + place % 16) * 8 + place / 16 % 8; }

/// Places of a row of so many words: the last block may have places of no byte.
KVQ_HD constexpr int value_places(int row_words) { return (row_words + 3) / 4 * 128; }

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
  if (side.exact() || side.is_bits()) return channel;
  if (side.bits == 3)
    return channel / 32 * 32 + channel / 4 % 2 * 16 + channel % 2 * 8 + channel / 8 % 4 * 2 + channel / 2 % 2;
  const CodePlace code = code_place(side, channel);
  const ValueByte byte = value_byte(side, code.byte);
  return (byte.index / 2 * side.codes_per_byte() + code.slice) * 16 + byte.index % 2 * 8 + 2 * code.lane + byte.half;
}

/// The step of 32 channels that a block of 16 value rows belongs to; its group is step / (group_size / 32).
KVQ_HD constexpr int value_step(const TileSide& side, int block) {
  if (side.bits == 3) return block / 2;
  const int h = block / side.codes_per_byte(), slice = block % side.codes_per_byte(), pairs = side.words() / 2;
  return h < 2 * pairs ? h / 2 * side.codes_per_byte() + slice : pairs * side.codes_per_byte() + slice / 2;
}

/// Inverse of value_place().
KVQ_HD constexpr int value_channel(const TileSide& side, int place) {
  if (side.exact() || side.is_bits()) return place;
  if (side.bits == 3) return place / 32 * 32 + place % 8 / 2 * 8 + place / 16 % 2 * 4 + place % 2 * 2 + place / 8 % 2;
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
