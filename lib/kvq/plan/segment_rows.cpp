#include <kvq/plan/layer_pages.h>
#include <kvq/plan/linear_rows.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/plan/table_rows.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <variant>

namespace kvq {

namespace {

/// Enters where lanes find the planes of a unit that begins at channel `first` of its segment.
void enter_places(const BitSegment& segment, int first, const TileSide& side, std::uint32_t (&places)[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    const int plane = lane % 4;
    if (plane >= segment.bits) continue;
    const int bit = key_bit(segment, first, plane), word = bit / 32;
    const auto offset = [&](int w) {
      return static_cast<std::uint32_t>(key_word_offset(side, lane / 4, std::min(w, side.row_words - 1)));
    };
    places[lane] = offset(word) | offset(word + 1) << kPlaceWordBits |
                   static_cast<std::uint32_t>(bit % 32) << 2 * kPlaceWordBits | kPlaceIsPlane;
  }
}

}  // namespace

bool has_segment_rows(const TensorPlan& plan, int dim) {
  const auto* coder = std::get_if<CodebookCoder>(&plan.coder);
  if (!coder || !plan.allocation || plan.centroids || dim != kTableHeadDim || scale_bytes(coder->scale_type) != 2)
    return false;
  const int entries = static_cast<int>(plan.allocation->channel_bits.size()) / dim;
  int words = 0;  // the most of any head
  bool linear = plan.allocation->has_row_scale();
  for (int entry = 0; entry < entries; ++entry) {
    const std::vector<BitSegment> segments = bit_segments(plan, entry, dim);
    if (segments.size() > kMostSegments) return false;
    int bits = 0;
    for (const BitSegment& segment : segments) {
      const std::span<const float> table = codebook_of(*coder, segment.bits, plan.rotation.head_index(entry));
      if (segment.bits > kMostLevelBits || !level_table(table)) return false;
      linear = linear && is_linear_table(table);
      bits += segment.channels * segment.bits;
    }
    words = std::max(words, (bits + 31) / 32);
  }
  return is_segment_row(words) && !linear;  // there are other kernels for linear rows
}

SegmentRows segment_rows(const TensorPlan& plan, int num_kv_heads, int dim) {
  SegmentRows rows;
  if (!has_segment_rows(plan, dim)) return rows;
  const auto& coder = std::get<CodebookCoder>(plan.coder);
  const TileSide side = tile_side(plan, dim);
  const bool one_scale = plan.allocation->has_row_scale();
  for (int head = 0; head < num_kv_heads; ++head) {
    const int entry = plan.rotation.head_index(head);
    const std::size_t begin = rows.weights.size();
    rows.weights.resize(begin + kMostUnitChannels), rows.sources.resize(begin + kMostUnitChannels);
    SegmentProgram program = {};
    int scale = 0;
    for (const BitSegment& segment : bit_segments(plan, head, dim)) {
      const LevelTable levels = level_table(codebook_of(coder, segment.bits, entry)).value();
      const float gain = one_scale ? plan.allocation->gain(entry, segment.bits) : 1.0f;
      for (int first = 0; first < segment.channels; first += kUnitChannels) {
        const auto unit = static_cast<std::size_t>(program.num_units++);
        const int channels = std::min(kUnitChannels, segment.channels - first);
        SegmentUnit& to = program.units[unit];
        std::copy(std::begin(levels.levels), std::end(levels.levels), to.levels);
        to.bits = segment.bits, to.scale = one_scale ? 0 : scale;
        to.first_bit = static_cast<std::uint16_t>(key_bit(segment, first, 0));
        to.channels = static_cast<std::uint16_t>(channels);
        enter_places(segment, first, side, program.places[unit]);
        for (int q = 0; q < channels; ++q) {
          const std::size_t at = begin + unit * kUnitChannels + static_cast<std::size_t>(q);
          rows.weights[at] = gain * levels.step;
          rows.sources[at] = static_cast<std::uint16_t>(segment.first_channel + first + q);
        }
      }
      ++scale;
    }
    for (int unit = 0; unit < program.num_units; ++unit) {
      SegmentUnit& of = program.units[unit];
      of.ends_scale = unit + 1 == program.num_units || program.units[unit + 1].scale != of.scale ? 1 : 0;
    }
    rows.programs.push_back(program);
  }
  return rows;
}

}  // namespace kvq
