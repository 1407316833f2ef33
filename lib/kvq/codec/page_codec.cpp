#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <vector>

namespace kvq {

namespace {

template <typename Byte>
struct Tile {
  const TileSide& format;
  Side side;
  int token;
  std::span<Byte> bytes;  ///< [format.bytes()]
};

/// The tile that holds a slot, and the slot's row in it.
template <typename Byte>
Tile<Byte> tile_of(const PageLayout& layout, Side side, int head, int slot, std::span<Byte> page) {
  KVQ_ASSERT(head >= 0 && head < layout.num_kv_heads && slot >= 0 && slot < layout.page_size);
  KVQ_ASSERT(page.size() == static_cast<std::size_t>(layout.page_bytes()));
  const TileSide& format = side == Side::v ? layout.v : layout.k;
  const int offset = side == Side::v ? layout.value_tile(head, slot) : layout.key_tile(head, slot);
  return {format, side, slot % kTileTokens,
          page.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(format.bytes()))};
}

/// Calls action(byte of the tile, its field, first bit of the code) for each part of a channel's code.
template <typename Byte, typename Action>
void for_each_part(const Tile<Byte>& tile, int channel, const Action& action) {
  const CodeParts parts = code_parts(tile.format, channel);
  int first = 0;
  for (const BitField& field : {parts.low, parts.high}) {
    if (field.width == 0) continue;
    const int byte = tile.side == Side::v ? value_code_offset(tile.format, tile.token, parts.lane, field.byte)
                                          : key_code_offset(tile.format, tile.token, parts.lane, field.byte);
    action(tile.bytes[static_cast<std::size_t>(byte)], field, first);
    first += field.width;
  }
}

unsigned mask_of(int width) { return (1u << width) - 1; }

/// Calls action(bytes of a number, its index among [G] scales, then [G] minima or zero points).
template <typename Byte, typename Action>
void for_each_number(const Tile<Byte>& tile, const Action& action) {
  std::size_t index = 0;
  for (int number = 0; number < tile.format.numbers; ++number)
    for (int group = 0; group < tile.format.groups(); ++group)
      action(tile.bytes.subspan(static_cast<std::size_t>(number_offset(tile.format, tile.token, group, number)),
                                static_cast<std::size_t>(tile.format.number_size)),
             index++);
}

void check_row(const TileSide& side, ScaleType type, std::size_t codes, std::size_t numbers) {
  KVQ_ASSERT(!side.exact() && !side.is_bits() && scale_bytes(type) == side.number_size);
  KVQ_ASSERT(codes == static_cast<std::size_t>(side.head_dim) &&
             numbers == static_cast<std::size_t>(side.groups() * side.numbers));
}

/// Calls action(bytes of a number, its index in the row) for all numbers of a row in bit tiles.
template <typename Byte, typename Action>
void for_each_row_number(const Tile<Byte>& tile, const Action& action) {
  for (int number = 0; number < tile.format.numbers; ++number)
    action(tile.bytes.subspan(static_cast<std::size_t>(number_offset(tile.format, tile.token, 0, number)),
                              static_cast<std::size_t>(tile.format.number_size)),
           static_cast<std::size_t>(number));
}

/// Byte y of a row in bit tiles.
template <typename Byte>
Byte& row_byte(const Tile<Byte>& tile, int y) {
  const int offset = tile.side == Side::v ? value_byte_offset(tile.format, tile.token, y)
                                          : key_word_offset(tile.format, tile.token, y / 4) + y % 4;
  return tile.bytes[static_cast<std::size_t>(offset)];
}

/// Calls action(channel, bit of its code, bit of the row) for all bits of all codes.
template <typename Action>
void for_each_code_bit(std::span<const BitSegment> segments, Side side, const Action& action) {
  for (const BitSegment& segment : segments)
    for (int channel = 0; channel < segment.channels; ++channel)
      for (int bit = 0; bit < segment.bits; ++bit)
        action(static_cast<std::size_t>(segment.first_channel + channel), bit,
               side == Side::v ? value_bit(segment, channel, bit) : key_bit(segment, channel, bit));
}

/// Width of each channel, 0 in channels of no segment.
std::vector<int> widths_of(std::span<const BitSegment> segments, int dim) {
  std::vector<int> widths(static_cast<std::size_t>(dim), 0);
  for (const BitSegment& segment : segments)
    for (int channel = 0; channel < segment.channels; ++channel)
      widths[static_cast<std::size_t>(segment.first_channel + channel)] = segment.bits;
  return widths;
}

void check_bit_row(const TileSide& side, ScaleType type, std::span<const BitSegment> segments, std::size_t codes,
                   std::size_t numbers) {
  KVQ_ASSERT(side.is_bits() && scale_bytes(type) == side.number_size);
  KVQ_ASSERT(codes == static_cast<std::size_t>(side.head_dim) && numbers <= static_cast<std::size_t>(side.numbers));
  for (const BitSegment& segment : segments) {
    KVQ_ASSERT(segment.bits >= 1 && segment.bits <= 8 && segment.first_channel >= 0 && segment.channels >= 0 &&
               segment.first_channel + segment.channels <= side.head_dim);
    KVQ_ASSERT(segment.first_bit >= 0 && segment.first_bit + segment.channels * segment.bits <= 32 * side.row_words);
  }
}

/// The bytes of a token's index.
template <typename Byte>
std::span<Byte> index_of(const Tile<Byte>& tile) {
  KVQ_ASSERT(tile.format.index_bytes > 0);
  return tile.bytes.subspan(static_cast<std::size_t>(index_offset(tile.format, tile.token)),
                            static_cast<std::size_t>(tile.format.index_bytes));
}

void store_exact(float x, std::span<std::byte> all, std::int64_t offset) {
  const float value = bf16_to_float(exact_bits(x));
  store_numbers(ScaleType::bf16, std::span{&value, 1}, all.subspan(static_cast<std::size_t>(offset), 2));
}

float load_bf16(std::span<const std::byte> all, std::int64_t offset) {
  float value = 0.0f;
  load_numbers(ScaleType::bf16, all.subspan(static_cast<std::size_t>(offset), 2), std::span{&value, 1});
  return value;
}

/// First byte of a channel of an exact row in its window slot.
std::int64_t window_offset(const WindowLayout& layout, Side side, int head, int row, int channel) {
  return head * layout.head_bytes() +
         (side == Side::v ? layout.value_offset(row, channel) : layout.key_offset(row, channel));
}

void check_window(const WindowLayout& layout, Side side, int head, int row, std::size_t dim, std::size_t slot_bytes) {
  KVQ_ASSERT(head >= 0 && head < layout.num_kv_heads && row >= 0 && row < layout.rows);
  KVQ_ASSERT(dim == static_cast<std::size_t>(side == Side::v ? layout.v.head_dim : layout.k.head_dim));
  KVQ_ASSERT(slot_bytes == static_cast<std::size_t>(layout.slot_bytes()));
}

}  // namespace

void store_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                    std::span<const std::uint8_t> codes, std::span<const float> numbers, std::span<std::byte> page) {
  const Tile<std::byte> tile = tile_of(layout, side, head, slot, page);
  check_row(tile.format, type, codes.size(), numbers.size());
  for (std::size_t channel = 0; channel < codes.size(); ++channel) {
    KVQ_ASSERT(codes[channel] <= mask_of(tile.format.bits));
    for_each_part(tile, static_cast<int>(channel), [&](std::byte& byte, const BitField& field, int first) {
      const unsigned part = unsigned{codes[channel]} >> first & mask_of(field.width);
      const unsigned others = std::to_integer<unsigned>(byte) & ~(mask_of(field.width) << field.shift);
      byte = static_cast<std::byte>(others | part << field.shift);
    });
  }
  for_each_number(tile,
                  [&](std::span<std::byte> at, std::size_t i) { store_numbers(type, numbers.subspan(i, 1), at); });
}

void load_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                   std::span<const std::byte> page, std::span<std::uint8_t> codes, std::span<float> numbers) {
  const Tile<const std::byte> tile = tile_of(layout, side, head, slot, page);
  check_row(tile.format, type, codes.size(), numbers.size());
  for (std::size_t channel = 0; channel < codes.size(); ++channel) {
    unsigned code = 0;
    for_each_part(tile, static_cast<int>(channel), [&](std::byte byte, const BitField& field, int first) {
      code |= (std::to_integer<unsigned>(byte) >> field.shift & mask_of(field.width)) << first;
    });
    codes[channel] = static_cast<std::uint8_t>(code);
  }
  for_each_number(tile,
                  [&](std::span<const std::byte> at, std::size_t i) { load_numbers(type, at, numbers.subspan(i, 1)); });
}

void store_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                    std::span<const BitSegment> segments, std::span<const std::uint8_t> codes,
                    std::span<const float> numbers, std::span<std::byte> page) {
  const Tile<std::byte> tile = tile_of(layout, side, head, slot, page);
  check_bit_row(tile.format, type, segments, codes.size(), numbers.size());
  const std::vector<int> widths = widths_of(segments, tile.format.head_dim);
  for (std::size_t channel = 0; channel < codes.size(); ++channel)
    KVQ_ASSERT(codes[channel] <= mask_of(widths[channel]));
  for (int y = 0; y < 4 * tile.format.row_words; ++y) row_byte(tile, y) = std::byte{0};
  for_each_code_bit(segments, side, [&](std::size_t channel, int bit, int place) {
    row_byte(tile, place / 8) |= static_cast<std::byte>((codes[channel] >> bit & 1) << place % 8);
  });
  for_each_row_number(tile, [&](std::span<std::byte> at, std::size_t i) {
    const float none = 0.0f;
    store_numbers(type, i < numbers.size() ? numbers.subspan(i, 1) : std::span{&none, 1}, at);
  });
}

void load_page_row(const PageLayout& layout, Side side, ScaleType type, int head, int slot,
                   std::span<const BitSegment> segments, std::span<const std::byte> page, std::span<std::uint8_t> codes,
                   std::span<float> numbers) {
  const Tile<const std::byte> tile = tile_of(layout, side, head, slot, page);
  check_bit_row(tile.format, type, segments, codes.size(), numbers.size());
  std::fill(codes.begin(), codes.end(), std::uint8_t{0});
  for_each_code_bit(segments, side, [&](std::size_t channel, int bit, int place) {
    const unsigned is_set = std::to_integer<unsigned>(row_byte(tile, place / 8)) >> place % 8 & 1u;
    codes[channel] = static_cast<std::uint8_t>(codes[channel] | is_set << bit);
  });
  for_each_row_number(tile, [&](std::span<const std::byte> at, std::size_t i) {
    if (i < numbers.size()) load_numbers(type, at, numbers.subspan(i, 1));
  });
}

void store_page_index(const PageLayout& layout, Side side, int head, int slot, int centroid,
                      std::span<std::byte> page) {
  const std::span<std::byte> index = index_of(tile_of(layout, side, head, slot, page));
  KVQ_ASSERT(centroid >= 0 && centroid < 1 << 8 * index.size());
  for (std::size_t i = 0; i < index.size(); ++i) index[i] = static_cast<std::byte>(centroid >> 8 * i & 0xff);
}

int load_page_index(const PageLayout& layout, Side side, int head, int slot, std::span<const std::byte> page) {
  const std::span<const std::byte> index = index_of(tile_of(layout, side, head, slot, page));
  int centroid = 0;
  for (std::size_t i = 0; i < index.size(); ++i) centroid |= std::to_integer<int>(index[i]) << 8 * i;
  return centroid;
}

void store_page_row(const PageLayout& layout, Side side, int head, int slot, std::span<const float> row,
                    std::span<std::byte> page) {
  const Tile<std::byte> tile = tile_of(layout, side, head, slot, page);
  KVQ_ASSERT(tile.format.exact() && row.size() == static_cast<std::size_t>(tile.format.head_dim));
  for (int channel = 0; channel < tile.format.head_dim; ++channel)
    store_exact(row[static_cast<std::size_t>(channel)], tile.bytes,
                exact_offset(tile.format.head_dim, tile.token, channel));
}

void load_page_row(const PageLayout& layout, Side side, int head, int slot, std::span<const std::byte> page,
                   std::span<float> row) {
  const Tile<const std::byte> tile = tile_of(layout, side, head, slot, page);
  KVQ_ASSERT(tile.format.exact() && row.size() == static_cast<std::size_t>(tile.format.head_dim));
  for (int channel = 0; channel < tile.format.head_dim; ++channel)
    row[static_cast<std::size_t>(channel)] =
        load_bf16(tile.bytes, exact_offset(tile.format.head_dim, tile.token, channel));
}

void store_window_row(const WindowLayout& layout, Side side, int head, int window_row, std::span<const float> row,
                      std::span<std::byte> slot) {
  check_window(layout, side, head, window_row, row.size(), slot.size());
  for (std::size_t channel = 0; channel < row.size(); ++channel)
    store_exact(row[channel], slot, window_offset(layout, side, head, window_row, static_cast<int>(channel)));
}

void load_window_row(const WindowLayout& layout, Side side, int head, int window_row, std::span<const std::byte> slot,
                     std::span<float> row) {
  check_window(layout, side, head, window_row, row.size(), slot.size());
  for (std::size_t channel = 0; channel < row.size(); ++channel)
    row[channel] = load_bf16(slot, window_offset(layout, side, head, window_row, static_cast<int>(channel)));
}

}  // namespace kvq
