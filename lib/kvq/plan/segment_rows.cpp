#include <kvq/plan/layer_pages.h>
#include <kvq/plan/linear_rows.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/plan/table_rows.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <variant>

namespace kvq {

namespace {

/// Weights of the sets of bits of a segment's codes, single bits first; none if there are no kernels for the codebook.
std::optional<std::vector<double>> set_weights(std::span<const float> table, int width) {
  if (table.empty()) return std::nullopt;
  if (width <= kMostSegmentBits && is_odd_table(table)) return odd_weights(table);
  if (is_linear_table(table)) return bit_weights(table);
  return std::nullopt;
}

int units_of(const BitSegment& segment) { return (segment.channels + kUnitChannels - 1) / kUnitChannels; }

/// Derived words of the rows of one head, or nothing if kernels do not take them.
std::optional<int> needed_words(const TensorPlan& plan, const CodebookCoder& coder, int kv_head, int dim) {
  const std::vector<BitSegment> segments = bit_segments(plan, kv_head, dim);
  int derived = 0;
  for (const BitSegment& segment : segments) {
    const auto weights = set_weights(codebook_of(coder, segment.bits, plan.rotation.head_index(kv_head)), segment.bits);
    if (!weights) return std::nullopt;
    derived += units_of(segment) * (static_cast<int>(weights->size()) - segment.bits);
  }
  if (segments.size() > kMostSegments) return std::nullopt;
  return derived;
}

}  // namespace

bool has_segment_rows(const TensorPlan& plan, int dim) {
  const auto* coder = std::get_if<CodebookCoder>(&plan.coder);
  if (!coder || !plan.allocation || plan.centroids || dim != kTableHeadDim || scale_bytes(coder->scale_type) != 2)
    return false;
  const int entries = static_cast<int>(plan.allocation->channel_bits.size()) / dim;
  int words = 0, derived = 0;  // the most of any head
  for (int entry = 0; entry < entries; ++entry) {
    int bits = 0;
    for (const BitSegment& segment : bit_segments(plan, entry, dim)) bits += segment.channels * segment.bits;
    words = std::max(words, (bits + 31) / 32);
    const std::optional<int> of_entry = needed_words(plan, *coder, entry, dim);
    if (!of_entry) return false;
    derived = std::max(derived, *of_entry);
  }
  // Without derived words rows with one scale are linear; there are other kernels for these.
  return is_segment_row(words) && derived <= derived_words(words) && (derived > 0 || !plan.allocation->has_row_scale());
}

SegmentRows segment_rows(const TensorPlan& plan, int num_kv_heads, int dim) {
  SegmentRows rows;
  if (!has_segment_rows(plan, dim)) return rows;
  const auto& coder = std::get<CodebookCoder>(plan.coder);
  const int row_words = tile_side(plan, dim).row_words, words = segment_words(row_words);
  const std::size_t bits = 32 * static_cast<std::size_t>(words);
  for (int head = 0; head < num_kv_heads; ++head) {
    const int entry = plan.rotation.head_index(head);
    SegmentProgram program = {};
    std::vector<float> weights(bits);
    std::vector<std::uint16_t> sources(bits);
    int scale = 0, derived = 0;
    for (const BitSegment& segment : bit_segments(plan, head, dim)) {
      const bool one_scale = plan.allocation->has_row_scale();
      const double gain = one_scale ? static_cast<double>(plan.allocation->gain(entry, segment.bits)) : 1.0;
      const std::vector<double> of_sets = set_weights(codebook_of(coder, segment.bits, entry), segment.bits).value();
      const auto enter = [&](int bit, int channel, std::size_t set) {
        const auto at = static_cast<std::size_t>(bit);
        weights[at] = static_cast<float>(gain * of_sets[set]);
        sources[at] = static_cast<std::uint16_t>(segment.first_channel + channel);
        program.masks[one_scale ? 0 : scale][bit / 32] |= std::uint32_t{1} << bit % 32;
      };
      for (int channel = 0; channel < segment.channels; ++channel)
        for (int i = 0; i < segment.bits; ++i)
          enter(key_bit(segment, channel, i), channel, static_cast<std::size_t>(i));
      for (int unit = 0; unit < units_of(segment); ++unit)
        for (std::size_t set = static_cast<std::size_t>(segment.bits); set < of_sets.size(); ++set, ++derived) {
          const int first = unit * kUnitChannels, channels = std::min(kUnitChannels, segment.channels - first);
          for (int i = 0, plane = 0; i < segment.bits; ++i)
            if (odd_set(segment.bits, static_cast<int>(set)) >> i & 1)
              program.planes[derived][plane++] = static_cast<std::uint16_t>(key_bit(segment, first, i));
          for (int q = 0; q < channels; ++q) enter(32 * (row_words + derived) + q, first + q, set);
        }
      ++scale;
    }
    for (int i = 0; i < kMostSegments; ++i)
      for (int word = 0; word < words; ++word)
        if (program.masks[i][word] != 0) program.active |= std::uint32_t{1} << (kMostSegmentChunks * i + word / 8);
    rows.programs.push_back(program);
    rows.weights.insert(rows.weights.end(), weights.begin(), weights.end());
    rows.sources.insert(rows.sources.end(), sources.begin(), sources.end());
  }
  return rows;
}

}  // namespace kvq
