#include <kvq/core/side.h>
#include <kvq/plan/page_layout.h>

#include <catch2/catch.hpp>

#include <cstdint>
#include <numeric>
#include <vector>

using namespace kvq;

namespace {

/// Every format of pages.md up to head_dim 576.
std::vector<TileSide> all_sides() {
  std::vector<TileSide> sides;
  for (const int bits : {2, 3, 4})
    for (int dim = 32; dim <= 576; dim += 32)
      for (int group = 32; group <= dim; group += 32)
        if (dim * bits % 128 == 0 && dim % group == 0)
          for (const int numbers : {1, 2}) sides.push_back({dim, bits, group, numbers, group % 64 ? 2 : 4});
  return sides;
}

std::string name(const TileSide& side) {
  return std::to_string(side.head_dim) + " x " + std::to_string(side.bits) + " bits, group " +
         std::to_string(side.group_size) + ", " + std::to_string(side.numbers) + " numbers of " +
         std::to_string(side.number_size);
}

/// Counts how often each bit of a tile is used; take() counts bits [8 byte + first, + count).
struct BitCount {
  explicit BitCount(int bytes) : bits(static_cast<std::size_t>(bytes) * 8, 0) {}
  std::vector<int> bits;
  void take(int byte, int first, int count) {
    REQUIRE(byte >= 0);
    for (int i = 0; i < count; ++i) ++bits.at(static_cast<std::size_t>(byte * 8 + first + i));
  }
  bool each_once() const {
    for (const int count : bits)
      if (count != 1) return false;
    return true;
  }
};

}  // namespace

TEST_CASE("Every code and number of a tile has bits of its own, and a tile has no others", "[plan]") {
  for (const TileSide& side : all_sides())
    for (const Side which : kSides) {
      INFO(name(side) << ", " << plural(which));
      BitCount taken(side.bytes());
      for (int token = 0; token < kTileTokens; ++token) {
        for (int channel = 0; channel < side.head_dim; ++channel) {
          const CodeParts parts = code_parts(side, channel);
          REQUIRE(parts.low.width + parts.high.width == side.bits);
          for (const BitField& field : {parts.low, parts.high}) {
            if (field.width == 0) continue;
            const int byte = which == Side::v ? value_code_offset(side, token, parts.lane, field.byte)
                                              : key_code_offset(side, token, parts.lane, field.byte);
            REQUIRE(byte < side.code_bytes());
            taken.take(byte, field.shift, field.width);
          }
        }
        for (int group = 0; group < side.groups(); ++group)
          for (int number = 0; number < side.numbers; ++number)
            taken.take(number_offset(side, token, group, number), 0, 8 * side.number_size);
      }
      CHECK(taken.each_once());
    }
}

TEST_CASE("byte_part is the inverse of code_parts", "[plan]") {
  for (const TileSide& side : all_sides()) {
    INFO(name(side));
    std::vector<int> bits_found(static_cast<std::size_t>(side.head_dim), 0);
    for (int lane = 0; lane < 4; ++lane)
      for (int byte = 0; byte < side.piece_bytes(); ++byte) {
        int shift = 0;
        for (int i = 0; i < parts_of_byte(side, byte); ++i) {
          const BytePart part = byte_part(side, lane, byte, i);
          const CodeParts parts = code_parts(side, part.channel);
          const BitField& field = part.first == 0 ? parts.low : parts.high;
          CHECK(parts.lane == lane);
          CHECK(part.first == (part.first == 0 ? 0 : parts.low.width));
          CHECK((field.byte == byte && field.shift == part.shift && field.width == part.width));
          CHECK(part.shift == shift);
          shift += part.width;
          bits_found.at(static_cast<std::size_t>(part.channel)) += part.width;
        }
        CHECK(shift == 8);
      }
    CHECK(bits_found == std::vector<int>(bits_found.size(), side.bits));
  }
}

TEST_CASE("Both parts of a code of three bits are in the byte and the half of their channel", "[plan]") {
  for (const int dim : {128, 256}) {
    const TileSide side{dim, 3, 128, 2};
    int split = 0;
    for (int channel = 0; channel < dim; ++channel) {
      const CodeParts parts = code_parts(side, channel);
      const int w = channel / 4 % 2, unit = channel / 128;
      CHECK(parts.low.byte % 4 == channel % 4);
      if (channel / 32 % 4 < 3) CHECK(parts.low.byte / 4 == 2 * unit + w);
      if (parts.high.width == 0) continue;
      ++split;
      CHECK(parts.high.byte / 4 == 2 * side.units() + unit);
      CHECK(parts.high.byte % 4 == parts.low.byte % 4);
      const ValueByte low = value_byte(side, parts.low.byte), high = value_byte(side, parts.high.byte);
      CHECK(low.half == high.half);
      CHECK(low.index % 2 == high.index % 2);
    }
    CHECK(split == dim / 4);
  }
}

TEST_CASE("Every channel of an exact tile has two bytes of its own", "[plan]") {
  for (int dim = 16; dim <= 576; dim += 16) {
    INFO("head_dim " << dim);
    const TileSide side{dim, 16, dim, 0};
    BitCount taken(side.bytes());
    for (int token = 0; token < kTileTokens; ++token)
      for (int channel = 0; channel < dim; ++channel) taken.take(exact_offset(dim, token, channel), 0, 16);
    CHECK(taken.each_once());
  }
}

TEST_CASE("Equal chunks of eight exact rows lie in different banks", "[plan]") {
  for (const int dim : {64, 128, 192, 256})
    for (int chunk = 0; chunk < dim / 8; ++chunk)
      for (const int first : {0, 8}) {
        unsigned banks = 0;
        for (int row = first; row < first + 8; ++row)
          banks |= 1u << exact_offset(dim, row, 8 * chunk) / kExactChunkBytes % 8;
        CHECK(banks == 0xffu);
      }
}

TEST_CASE("value_channel is the inverse of value_place", "[plan]") {
  for (const TileSide& side : all_sides()) {
    INFO(name(side));
    std::vector<bool> seen(static_cast<std::size_t>(side.head_dim), false);
    for (int channel = 0; channel < side.head_dim; ++channel) {
      const int place = value_place(side, channel);
      REQUIRE(place >= 0);
      REQUIRE(place < side.head_dim);
      CHECK_FALSE(seen[static_cast<std::size_t>(place)]);
      seen[static_cast<std::size_t>(place)] = true;
      CHECK(value_channel(side, place) == channel);
    }
  }
  const TileSide exact{128, 16, 128, 0};
  for (int channel = 0; channel < 128; ++channel) {
    CHECK(value_place(exact, channel) == channel);
    CHECK(value_channel(exact, channel) == channel);
  }
}

TEST_CASE("The sixteen rows of a block of values belong to one step and one group", "[plan]") {
  for (const TileSide& side : all_sides()) {
    INFO(name(side));
    std::vector<int> blocks_of_step(static_cast<std::size_t>(side.head_dim / 32), 0);
    for (int block = 0; block < side.head_dim / 16; ++block) {
      const int step = value_step(side, block);
      ++blocks_of_step.at(static_cast<std::size_t>(step));
      for (int row = 0; row < 16; ++row) {
        const int channel = value_channel(side, 16 * block + row);
        CHECK(channel / 32 == step);
        CHECK(channel / side.group_size == step / (side.group_size / 32));
      }
    }
    for (const int blocks : blocks_of_step) CHECK(blocks == 2);
  }
}

TEST_CASE("A lane of a value tile finds in a word one block row of its four tokens", "[plan]") {
  // Word h of lane 4 r + u: rows r (even h) and r + 8 (odd h) of the blocks h div 2 * C + slice, tokens 2u, 2u + 8, 2u
  // + 1, 2u + 9.
  for (const TileSide& side : all_sides()) {
    INFO(name(side));
    for (int token = 0; token < kTileTokens; ++token)
      for (int channel = 0; channel < side.head_dim; ++channel) {
        const CodeParts code = code_parts(side, channel);
        const int place = value_place(side, channel), r = place % 8, u = token % 8 / 2, i = token % 2 * 2 + token / 8;
        for (const BitField& field : {code.low, code.high}) {
          if (field.width == 0) continue;
          const int at = value_code_offset(side, token, code.lane, field.byte);
          // Of three bits the word h belongs to both blocks of its steps.
          int h = place / 16 / side.codes_per_byte() * 2 + place / 8 % 2;
          if (side.bits == 3) {
            h = value_byte(side, field.byte).index;
            CHECK(h % 2 == place / 8 % 2);
          } else {
            CHECK(place / 16 % side.codes_per_byte() == field.shift / side.bits);
          }
          CHECK(at == chunk_offset(side, 4 * r + u, 4 * h + i));
        }
      }
  }
}

TEST_CASE("Tiles have the written sizes and keep every load aligned", "[plan]") {
  const auto token_bytes = [](int dim, int bits, int group, int numbers) {
    return 2 * TileSide{dim, bits, group, numbers}.bytes() / kTileTokens;
  };
  CHECK(token_bytes(128, 2, 128, 2) == 72);
  CHECK(token_bytes(128, 2, 128, 1) == 68);
  CHECK(token_bytes(128, 3, 128, 2) == 104);
  CHECK(token_bytes(256, 3, 128, 1) == 200);
  CHECK(token_bytes(128, 4, 128, 2) == 136);
  CHECK(token_bytes(64, 2, 64, 2) == 40);
  CHECK(token_bytes(96, 4, 96, 1) == 100);
  CHECK(token_bytes(256, 4, 128, 2) == 272);
  CHECK(token_bytes(128, 16, 128, 0) == 512);
  for (const TileSide& side : all_sides()) {
    INFO(name(side));
    CHECK(side.bytes() ==
          kTileTokens * (side.head_dim * side.bits / 8 + side.groups() * side.numbers * side.number_size));
    CHECK(side.bytes() % 32 == 0);
    CHECK(side.code_bytes() % 32 == 0);
    CHECK(2 * side.piece_bytes() % chunk_bytes(side) == 0);
  }
}

TEST_CASE("Tiles of all heads and slots fill a page without gap or overlap", "[plan]") {
  for (const int page_size : {16, 32, 64, 128}) {
    const PageLayout layout{.k = {128, 4, 32, 2}, .v = {64, 2, 64, 1}, .num_kv_heads = 3, .page_size = page_size};
    std::vector<int> taken(static_cast<std::size_t>(layout.page_bytes()), 0);
    for (int head = 0; head < 3; ++head)
      for (int slot = 0; slot < page_size; slot += kTileTokens) {
        for (int i = 0; i < layout.k.bytes(); ++i)
          ++taken.at(static_cast<std::size_t>(layout.key_tile(head, slot) + i));
        for (int i = 0; i < layout.v.bytes(); ++i)
          ++taken.at(static_cast<std::size_t>(layout.value_tile(head, slot) + i));
        CHECK(layout.key_tile(head, slot + 15) == layout.key_tile(head, slot));
        CHECK(layout.value_tile(head, slot + 15) == layout.value_tile(head, slot));
      }
    CHECK(taken == std::vector<int>(taken.size(), 1));
  }
}

TEST_CASE("Window rows and channels fill a slot, and positions go around it", "[plan]") {
  for (const TileSide& coded : {TileSide{128, 2, 128, 2}, TileSide{64, 2, 64, 1}, TileSide{96, 4, 96, 2},
                                TileSide{128, 4, 32, 2}, TileSide{128, 3, 128, 2}, TileSide{256, 3, 64, 1}}) {
    const int dim = coded.head_dim;
    const WindowLayout layout{
        .num_kv_heads = 2,
        .k = {80, 16, 80, 0},
        .v = {dim, 16, dim, 0},
        .coded_v = coded,
        .rows = 48,
    };
    std::vector<int> taken(static_cast<std::size_t>(layout.slot_bytes()), 0);
    for (int head = 0; head < 2; ++head)
      for (int row = 0; row < 48; ++row) {
        const auto take = [&](int offset) {
          ++taken.at(static_cast<std::size_t>(head * layout.head_bytes() + offset));
          ++taken.at(static_cast<std::size_t>(head * layout.head_bytes() + offset + 1));
        };
        for (int channel = 0; channel < 80; ++channel) take(layout.key_offset(row, channel));
        for (int channel = 0; channel < dim; ++channel) take(layout.value_offset(row, channel));
      }
    CHECK(taken == std::vector<int>(taken.size(), 1));
  }
  const WindowLayout layout{.num_kv_heads = 1, .rows = 48};
  CHECK(layout.row(0) == 0);
  CHECK(layout.row(47) == 47);
  CHECK(layout.row(48) == 0);
  CHECK(layout.row(100) == 4);
  CHECK(layout.row((std::int64_t{1} << 33) + 5) == static_cast<int>(((std::int64_t{1} << 33) + 5) % 48));
}

TEST_CASE("Rows of all slots lie in the tile pair of their slot, head and row", "[plan]") {
  const WindowLayout layout{3, {128, 16, 128, 0}, {64, 16, 64, 0}, {64, 16, 64, 0}, 48};
  for (int slot = 0; slot < 4; ++slot)
    for (int head = 0; head < 3; ++head)
      for (int row = 0; row < layout.rows; ++row)
        REQUIRE(layout.tile_pair(std::int64_t{slot} * layout.rows + row, head) +
                    exact_offset(128, row % kTileTokens, 77) ==
                slot * layout.slot_bytes() + head * layout.head_bytes() + layout.key_offset(row, 77));
}

TEST_CASE("Of each chunk of turned values, the four lanes of a row have two neighboring places each", "[plan]") {
  for (const TileSide& side : all_sides()) {
    CAPTURE(name(side));
    for (int place = 0; place < side.head_dim; ++place) {
      const int first = value_channel(side, place / 8 * 8 + place % 2), lane = place % 8 / 2;
      REQUIRE(first % 32 < 8);
      REQUIRE(value_channel(side, place) == first + 8 * lane);
    }
  }
}

// Bit tiles

namespace {

/// Bit tiles of all numbers of words, with numbers and indices of all sizes.
std::vector<TileSide> bit_sides() {
  std::vector<TileSide> sides;
  for (int words = 1; words <= 40; ++words)
    sides.push_back({.head_dim = 40,
                     .bits = 0,
                     .group_size = 40,
                     .numbers = words % 6,
                     .number_size = words % 2 ? 2 : 4,
                     .row_words = words,
                     .index_bytes = words % 3});
  return sides;
}

std::string bits_name(const TileSide& side) {
  return std::to_string(side.row_words) + " words, " + std::to_string(side.numbers) + " numbers";
}

}  // namespace

TEST_CASE("Every bit, number and index of a bit tile has bits of its own, and a tile has no others", "[plan]") {
  for (const TileSide& side : bit_sides())
    for (const Side which : kSides) {
      INFO(bits_name(side) << ", " << plural(which));
      BitCount taken(side.bytes());
      for (int token = 0; token < kTileTokens; ++token) {
        for (int byte = 0; byte < 4 * side.row_words; ++byte) {
          const int at = which == Side::v ? value_byte_offset(side, token, byte)
                                          : key_word_offset(side, token, byte / 4) + byte % 4;
          REQUIRE(at < side.code_bytes());
          taken.take(at, 0, 8);
        }
        for (int number = 0; number < side.numbers; ++number)
          taken.take(number_offset(side, token, 0, number), 0, 8 * side.number_size);
        if (side.index_bytes > 0) taken.take(index_offset(side, token), 0, 8 * side.index_bytes);
      }
      CHECK(taken.each_once());
      CHECK(side.bytes() % 16 == 0);
    }
}

TEST_CASE("Code tiles with indices have no other bits either", "[plan]") {
  for (const int index_bytes : {1, 2}) {
    const TileSide side{.head_dim = 128, .bits = 2, .group_size = 64, .numbers = 2, .index_bytes = index_bytes};
    BitCount taken(side.bytes());
    taken.take(0, 0, 8 * (side.code_bytes() + side.number_bytes()));
    for (int token = 0; token < kTileTokens; ++token) taken.take(index_offset(side, token), 0, 8 * index_bytes);
    CHECK(taken.each_once());
  }
}

TEST_CASE("The codes of a segment fill its bits, unit by unit", "[plan]") {
  for (int bits = 1; bits <= 8; ++bits)
    for (const int channels : {1, 7, 31, 32, 33, 64, 95, 128}) {
      INFO(channels << " channels of " << bits << " bits");
      const BitSegment segment{.bits = bits, .first_channel = 5, .channels = channels, .first_bit = 77};
      std::vector<int> keys(static_cast<std::size_t>(channels * bits), 0), values(keys);
      for (int channel = 0; channel < channels; ++channel)
        for (int bit = 0; bit < bits; ++bit) {
          const int key = key_bit(segment, channel, bit) - 77, value = value_bit(segment, channel, bit) - 77;
          ++keys.at(static_cast<std::size_t>(key));
          ++values.at(static_cast<std::size_t>(value));
          CHECK((key / (kUnitChannels * bits) == channel / kUnitChannels &&
                 value / (kUnitChannels * bits) == channel / kUnitChannels));
        }
      CHECK((keys == std::vector<int>(keys.size(), 1) && values == keys));
    }
}

TEST_CASE("Codes of values are cut into fields of 8, 4, 2 and 1 bits, the widest one lowest", "[plan]") {
  const std::vector<std::vector<int>> widths = {{1}, {2}, {2, 1}, {4}, {4, 1}, {4, 2}, {4, 2, 1}, {8}};
  for (int bits = 1; bits <= 8; ++bits) {
    int first = 0;
    for (const int width : widths[static_cast<std::size_t>(bits - 1)]) {
      for (int bit = first; bit < first + width; ++bit) {
        INFO("bit " << bit << " of " << bits);
        CHECK((code_field(bits, bit).first == first && code_field(bits, bit).width == width));
      }
      first += width;
    }
    CHECK(first == bits);
  }
}

TEST_CASE("Planes of a key's unit lie one behind the other, fields of a value's side by side", "[plan]") {
  const BitSegment segment{.bits = 3, .first_channel = 0, .channels = 40, .first_bit = 0};
  CHECK((key_bit(segment, 6, 0) == 6 && key_bit(segment, 6, 1) == 38 && key_bit(segment, 6, 2) == 70));
  CHECK((value_bit(segment, 6, 0) == 12 && value_bit(segment, 6, 1) == 13 && value_bit(segment, 6, 2) == 70));
  // The last unit has eight channels.
  CHECK((key_bit(segment, 33, 0) == 97 && key_bit(segment, 33, 2) == 96 + 17));
  CHECK((value_bit(segment, 33, 1) == 96 + 3 && value_bit(segment, 33, 2) == 96 + 17));
}

TEST_CASE("A lane of a bit tile finds the words of two tokens, or the bytes of four", "[plan]") {
  const TileSide side{.head_dim = 64, .bits = 0, .group_size = 64, .numbers = 1, .row_words = 15};
  for (int r = 0; r < 8; ++r)
    for (int t = 0; t < 4; ++t) {
      const int lane = 4 * r + t;
      for (int i = 0; i < 4; ++i) {
        CHECK(key_word_offset(side, r + i % 2 * 8, 2 * t + i / 2) == 16 * lane + 4 * i);
        const int token = 2 * t + i / 2 + i % 2 * 8;
        for (int word = 0; word < 4; ++word)
          CHECK(value_byte_offset(side, token, r + 8 * word) == 16 * lane + 4 * word + i);
        for (int word = 0; word < 2; ++word)
          CHECK(value_byte_offset(side, token, 32 + r + 8 * word) == 512 + 8 * lane + 4 * word + i);
      }
      for (const int half : {0, 1}) CHECK(key_word_offset(side, r + 8 * half, 8 + t) == 512 + 8 * lane + 4 * half);
    }
  CHECK(key_word_offset(side, 11, 13) == 768 + (3 * 3 + 1) * 8 + 4);
  CHECK(value_byte_offset(side, 11, 48 + 7) == 768 + (4 * 7 + 1) * 4 + 3);
}
