#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/plan/table_layout.h>

#include <cstdint>

/// Keys of mixed widths with codebook codes, as tuned kernels multiply them: unit by unit. A unit has up to 32 channels
/// of one width (pages.md, "Bit tiles"), so one codebook and one scale; it is a step of an integer product, whatever
/// its number of channels. Units of fewer than 32 channels do not begin at words, so a program says for each head where
/// their bits are.
namespace kvq {

constexpr int kMostSegments = 4;
/// Units of 128 channels at most: each segment may end with a unit of fewer than 32 channels.
constexpr int kMostSegmentUnits = kTableUnits + kMostSegments - 1;
constexpr int kMostUnitChannels = kUnitChannels * kMostSegmentUnits;  ///< of a query, that products read

/// Whether tuned kernels read rows of so many words: of 2 or of 3 bits a channel at head_dim 128, on average.
KVQ_HD constexpr bool is_segment_row(int row_words) { return row_words == 8 || row_words == 12; }

/// A unit of one head's rows.
struct SegmentUnit {
  std::uint32_t levels[4];  ///< LevelTable::levels of its width
  std::int32_t bits;        ///< of a code
  std::int32_t scale;       ///< number of the scale that its codes are multiplied by
  std::int32_t ends_scale;  ///< 1: the last unit with this scale, else 0
  std::uint16_t first_bit, channels;
};

/// Where a lane finds a plane of a unit, one bit of each code: in a tile the offsets of the words that its bits begin
/// in and end in, 12 bits each; then, 5 bits, the plane's first bit in the first word; then whether there is a plane.
constexpr int kPlaceWordBits = 12;
constexpr std::uint32_t kPlaceIsPlane = std::uint32_t{1} << (2 * kPlaceWordBits + 5);

/// The rows of one KV head.
struct SegmentProgram {
  SegmentUnit units[kMostSegmentUnits];
  /// Of lane 4 g + t plane t of token g; that of token g + 8 is 4 bytes behind.
  std::uint32_t places[kMostSegmentUnits][32];
  std::int32_t num_units;
  std::int32_t unused[3];
};

}  // namespace kvq
