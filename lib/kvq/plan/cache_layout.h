#pragma once

#include <array>
#include <cstdint>

/// Byte arithmetic of quantized rows (formats/packing.md, "Mixed widths" and "Bytes"), in constexpr integers, for host
/// and device.
namespace kvq {

/// A segment: consecutive channels of one width.
struct CodeSegment {
  int bits = 0;         ///< width of a code
  int stored_bits = 0;  ///< bits that a code takes: 8 for the widths 5, 6, 7 of mixed rows
  int first_channel = 0;
  int channels = 0;
  int byte_offset = 0;  ///< from the row's first byte
};

/// Byte offsets of the parts of one KV head's row.
struct RowLayout {
  static constexpr int kMaxSegments = 8;
  int num_segments = 0;
  std::array<CodeSegment, kMaxSegments> segments{};
  int numbers_offset = 0;  ///< first byte of the scales and minima
  int num_numbers = 0;
  int index_offset = 0;  ///< first byte of the centroid index
  int index_bytes = 0;   ///< 0, 1 or 2
  int row_bytes = 0;     ///< of this head's row; see common_row_bytes()
};

/// Bits that the code of a channel takes in a mixed row.
constexpr int stored_bits(int width) { return width > 4 ? 8 : width; }

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

/// Layout of one head's mixed row, before common_row_bytes() rounds its size up.
/// @param channel_bits  [dim] descending, 0..8
/// @param row_scale     the row has one scale, not one for each segment
constexpr RowLayout mixed_row_layout(const std::uint8_t* channel_bits, int dim, int scale_bytes, int index_bytes,
                                     bool row_scale = false) {
  RowLayout layout;
  int offset = 0;
  for (int j = 0; j < dim && channel_bits[j] > 0;) {
    int end = j;
    while (end < dim && channel_bits[end] == channel_bits[j]) ++end;
    const int width = channel_bits[j];
    layout.segments[static_cast<unsigned>(layout.num_segments++)] = {width, stored_bits(width), j, end - j, offset};
    offset += ((end - j) * stored_bits(width) + 7) / 8;
    j = end;
  }
  layout.numbers_offset = round_up(offset, scale_bytes);
  layout.num_numbers = row_scale && layout.num_segments > 1 ? 1 : layout.num_segments;
  const int end = layout.numbers_offset + layout.num_numbers * scale_bytes;
  layout.index_bytes = index_bytes;
  layout.index_offset = index_bytes == 2 ? round_up(end, 2) : end;
  layout.row_bytes = layout.index_offset + index_bytes;
  return layout;
}

constexpr int kRowWord = 4;

/// Bytes of the mixed rows of all heads of a side: the largest head's bytes, rounded up to words of 4 bytes.
constexpr int common_row_bytes(int largest) { return round_up(largest, kRowWord); }

/// Bytes of one layer's quantized tokens.
struct CacheLayout {
  int num_kv_heads = 0;
  int k_row_bytes = 0, v_row_bytes = 0;
  constexpr std::int64_t token_bytes() const { return std::int64_t{num_kv_heads} * (k_row_bytes + v_row_bytes); }
  constexpr std::int64_t page_bytes(int page_size) const { return page_size * token_bytes(); }
};

}  // namespace kvq
