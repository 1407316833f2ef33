#include <kvq/plan/layer_pages.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/plan/serving.h>
#include <kvq/plan/table_rows.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using namespace kvq;

namespace {

std::vector<float> odd_table(int bits, double size) {
  std::vector<float> table;
  const int half = 1 << (bits - 1);
  for (int i = -half; i < half; ++i) {
    const double x = i < 0 ? -1.0 - i : i;
    table.push_back(static_cast<float>((i < 0 ? -size : size) * (0.2 + 0.4 * x + 0.05 * x * x)));
  }
  return table;
}

/// Widths of one head: runs of channels.
std::vector<std::uint8_t> widths_of(const std::vector<std::pair<int, int>>& runs) {
  std::vector<std::uint8_t> widths;
  for (const auto& [width, channels] : runs)
    widths.insert(widths.end(), static_cast<std::size_t>(channels), static_cast<std::uint8_t>(width));
  return widths;
}

/// Two heads; codebooks of the second are twice as wide.
TensorPlan segment_plan(const std::vector<std::uint8_t>& first, const std::vector<std::uint8_t>& second) {
  TensorPlan plan;
  plan.rotation.scope = Scope::kv_head;
  CodebookCoder coder{.bits = 4, .group_size = 0, .per_head = true};
  for (const int width : {1, 2, 3, 4}) {
    coder.tables[width] = odd_table(width, 1.0);
    for (const float x : odd_table(width, 2.0)) coder.tables[width].push_back(x);
  }
  BitAllocation widths{.channel_bits = first};
  widths.channel_bits.insert(widths.channel_bits.end(), second.begin(), second.end());
  plan.coder = coder, plan.allocation = widths;
  return plan;
}

const std::vector<std::uint8_t> kMixed = widths_of({{4, 21}, {3, 86}, {2, 21}}), kEqual = widths_of({{3, 128}});

}  // namespace

TEST_CASE("A program's units have the codes of their channels, and levels that are entries of codebooks", "[plan]") {
  const bool one_scale = GENERATE(false, true);
  const int row_words = GENERATE(8, 12);
  TensorPlan plan = row_words == 12
                        ? segment_plan(kMixed, kEqual)
                        : segment_plan(widths_of({{4, 3}, {3, 21}, {2, 77}, {1, 27}}), widths_of({{2, 128}}));
  if (one_scale)
    for (int i = 0; i < 2 * kGainWidths; ++i)
      plan.allocation->segment_gain.push_back(std::exp2(static_cast<float>(i % 3)));
  REQUIRE(has_segment_rows(plan, 128));
  const SegmentRows rows = segment_rows(plan, 2, 128);
  REQUIRE(rows.programs.size() == 2);
  const TileSide side = tile_side(plan, 128);
  REQUIRE(side.row_words == row_words);
  for (int head = 0; head < 2; ++head) {
    const SegmentProgram& program = rows.programs[static_cast<std::size_t>(head)];
    const std::vector<BitSegment> segments = bit_segments(plan, head, 128);
    for (const int token : {0, 3, 7, 8, 13}) {
      // A tile whose other tokens have all bits set.
      std::vector<std::uint8_t> tile(static_cast<std::size_t>(side.code_bytes()), 0xFF);
      for (int w = 0; w < row_words; ++w)
        std::memset(tile.data() + key_word_offset(side, token, w), 0, sizeof(std::uint32_t));
      std::vector<int> codes(128), scale_of(128), seen(128);
      for (std::size_t s = 0; s < segments.size(); ++s)
        for (int c = 0; c < segments[s].channels; ++c) {
          const auto channel = static_cast<std::size_t>(segments[s].first_channel + c);
          codes[channel] = static_cast<int>((channel * 2654435761u + static_cast<unsigned>(token) * 40503u) >> 7 &
                                            ((1u << segments[s].bits) - 1));
          scale_of[channel] = one_scale ? 0 : static_cast<int>(s);
          for (int i = 0; i < segments[s].bits; ++i) {
            const int bit = key_bit(segments[s], c, i);
            tile[static_cast<std::size_t>(key_word_offset(side, token, bit / 32) + bit % 32 / 8)] |=
                static_cast<std::uint8_t>((codes[channel] >> i & 1) << bit % 8);
          }
        }
      for (int unit = 0; unit < program.num_units; ++unit) {
        const SegmentUnit& of = program.units[unit];
        CHECK((of.ends_scale != 0) == (unit + 1 == program.num_units || program.units[unit + 1].scale != of.scale));
        for (int q = 0; q < of.channels; ++q) {
          int code = 0;
          for (int i = 0; i < of.bits; ++i) {
            const std::uint32_t place = program.places[unit][4 * (token % 8) + i];
            CHECK((place & kPlaceIsPlane) != 0);
            const auto word = [&](std::uint32_t offset) {
              std::uint32_t bits = 0;
              std::memcpy(&bits, tile.data() + (offset & 0xFFFu) + 4 * (token / 8), sizeof bits);
              return std::uint64_t{bits};
            };
            const std::uint64_t two = word(place) | word(place >> kPlaceWordBits) << 32;
            code |= static_cast<int>(two >> (place >> 2 * kPlaceWordBits & 31u) >> q & 1) << i;
          }
          const auto at = static_cast<std::size_t>((head * kMostSegmentUnits + unit) * kUnitChannels + q);
          const std::size_t channel = rows.sources[at];
          CHECK(code == codes[channel]);
          CHECK(of.scale == scale_of[channel]);
          ++seen[channel];
          const int width = plan.allocation->channel_bits[static_cast<std::size_t>(head) * 128 + channel];
          CHECK(of.bits == width);
          const auto level = static_cast<std::int8_t>(of.levels[code / 4] >> 8 * (code % 4));
          const std::vector<float>& table = std::get<CodebookCoder>(plan.coder).tables.at(width);
          const double gain = one_scale ? static_cast<double>(plan.allocation->gain(head, width)) : 1.0;
          CHECK(static_cast<double>(rows.weights[at]) * level ==
                Approx(gain * static_cast<double>(table[static_cast<std::size_t>((head << width) + code)])));
        }
        for (int q = of.channels; q < kUnitChannels; ++q)
          CHECK(rows.weights[static_cast<std::size_t>((head * kMostSegmentUnits + unit) * kUnitChannels + q)] == 0.0f);
      }
      for (std::size_t c = 0; c < 128; ++c)
        CHECK(seen[c] == (plan.allocation->channel_bits[static_cast<std::size_t>(head) * 128 + c] > 0 ? 1 : 0));
    }
  }
}

TEST_CASE("Mixed widths that tuned kernels read", "[plan]") {
  const auto reads = [](const std::vector<std::uint8_t>& widths, auto change) {
    TensorPlan plan = segment_plan(widths, kEqual);
    change(plan, std::get<CodebookCoder>(plan.coder));
    return has_segment_rows(plan, static_cast<int>(widths.size()));
  };
  const auto same = [](TensorPlan&, CodebookCoder&) {};
  CHECK(reads(kMixed, same));
  CHECK(reads(widths_of({{4, 32}, {3, 72}, {2, 16}, {1, 8}}), same));
  CHECK(reads(widths_of({{4, 96}, {0, 32}}), same));
  CHECK(reads(widths_of({{4, 64}, {2, 64}}), same));
  CHECK_FALSE(reads(widths_of({{4, 33}, {3, 72}, {2, 15}, {1, 8}}), same));  // 387 bits
  // Rows of 8 words, beside which the other head's are of 2 bits.
  const auto two_bits = [](TensorPlan& plan, CodebookCoder&) {
    std::fill(plan.allocation->channel_bits.begin() + 128, plan.allocation->channel_bits.end(), std::uint8_t{2});
  };
  CHECK(reads(widths_of({{3, 20}, {2, 88}, {1, 20}}), two_bits));
  CHECK(reads(widths_of({{4, 64}, {0, 64}}), two_bits));
  CHECK(reads(widths_of({{4, 43}, {3, 28}, {0, 57}}), two_bits));
  CHECK_FALSE(reads(widths_of({{3, 40}, {2, 88}}), two_bits));  // 296 bits
  CHECK_FALSE(reads(widths_of({{5, 8}, {3, 112}, {1, 8}}), [](TensorPlan&, CodebookCoder& coder) {
    for (int i = 0; i < 64; ++i) coder.tables[5].push_back(0.1f * static_cast<float>(2 * (i % 32) - 31));
  }));
  CHECK_FALSE(reads(kMixed, [](TensorPlan&, CodebookCoder& coder) { coder.tables.at(3)[0] -= 0.01f; }));
  // Levels need not be symmetric about 0.
  CHECK(reads(kMixed, [](TensorPlan&, CodebookCoder& coder) { coder.tables.at(3)[0] -= 0.1f; }));
  CHECK_FALSE(reads(kMixed, [](TensorPlan&, CodebookCoder& coder) { coder.scale_type = ScaleType::fp32; }));
  CHECK_FALSE(reads(kMixed, [](TensorPlan& plan, CodebookCoder&) { plan.centroids = Centroids{.count = 9}; }));
  CHECK(segment_rows(segment_plan(widths_of({{4, 128}}), kEqual), 2, 128).programs.empty());
}

TEST_CASE("Block-GTQ of 2 and 3 bits has kernels for decode and write", "[plan]") {
  TensorPlan values;
  values.coder = CodebookCoder{.bits = 3, .group_size = 128, .tables = {{3, odd_table(3, 1.0)}}};
  LayerPlan plan{
      .layer = 0,
      .geometry = {.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 128, .v_head_dim = 128, .softmax_scale = 1.0},
      .k = segment_plan(kMixed, kEqual),
      .v = values,
  };
  CHECK(cache_format_name(plan) == "w12n3c/w12n1t3");
  const auto decode = [&] { return served_by(plan, Activation::bf16).by(KernelVerb::decode); };
  const auto write = [&] { return served_by(plan, Activation::bf16).by(KernelVerb::quantize_write); };
  CHECK(decode() == KernelKind::tuned);
  CHECK(write() == KernelKind::tuned);
  plan.k.allocation->segment_gain.assign(2 * kGainWidths, 1.0f);
  CHECK(cache_format_name(plan) == "w12n1c/w12n1t3");
  CHECK(decode() == KernelKind::tuned);
  CHECK(write() == KernelKind::tuned);
  plan.k = segment_plan(widths_of({{5, 8}, {3, 112}, {1, 8}}), kEqual);
  CHECK(decode() == KernelKind::generic);
  CHECK(write() == KernelKind::generic);
  // The write takes any number of words, and codebooks without levels.
  plan.k = segment_plan(widths_of({{4, 100}, {3, 28}}), kEqual);
  CHECK(decode() == KernelKind::generic);
  CHECK(write() == KernelKind::tuned);
  std::get<CodebookCoder>(plan.k.coder).rule = ScaleRule::least_squares;
  CHECK(write() == KernelKind::generic);
  // Of 2 bits, beside values whose rows are linear.
  plan.k = segment_plan(widths_of({{3, 20}, {2, 88}, {1, 20}}), widths_of({{2, 128}}));
  CHECK(decode() == KernelKind::generic);
  plan.v->coder = CodebookCoder{.bits = 2, .group_size = 128, .tables = {{2, odd_table(2, 1.0)}}};
  CHECK(cache_format_name(plan) == "w8n3c/w8n1");
  CHECK(decode() == KernelKind::tuned);
  CHECK(write() == KernelKind::tuned);
  // Values of mixed widths are written by the generic kernel.
  plan.v = plan.k;
  CHECK(write() == KernelKind::generic);
}
