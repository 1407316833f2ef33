#include <kvq/plan/layer_pages.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/plan/serving.h>
#include <kvq/plan/table_rows.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

TEST_CASE("Products of a program's words are the entries of codebooks", "[plan]") {
  const bool one_scale = GENERATE(false, true);
  const int row_words = GENERATE(8, 12), bits_of_product = 32 * segment_words(row_words);
  TensorPlan plan = row_words == 12
                        ? segment_plan(kMixed, kEqual)
                        : segment_plan(widths_of({{4, 3}, {3, 21}, {2, 77}, {1, 27}}), widths_of({{2, 128}}));
  if (one_scale)
    for (int i = 0; i < 2 * kGainWidths; ++i)
      plan.allocation->segment_gain.push_back(std::exp2(static_cast<float>(i % 3)));
  REQUIRE(has_segment_rows(plan, 128));
  const SegmentRows rows = segment_rows(plan, 2, 128);
  REQUIRE(rows.programs.size() == 2);
  for (int head = 0; head < 2; ++head) {
    const SegmentProgram& program = rows.programs[static_cast<std::size_t>(head)];
    const std::vector<BitSegment> segments = bit_segments(plan, head, 128);
    for (unsigned seed = 1; seed <= 8; ++seed) {
      std::vector<int> row(static_cast<std::size_t>(32 * row_words)), codes(128), scale_of(128);
      for (std::size_t s = 0; s < segments.size(); ++s)
        for (int c = 0; c < segments[s].channels; ++c) {
          const auto channel = static_cast<std::size_t>(segments[s].first_channel + c);
          codes[channel] =
              static_cast<int>((channel * 2654435761u + seed * 40503u) >> 7 & ((1u << segments[s].bits) - 1));
          scale_of[channel] = one_scale ? 0 : static_cast<int>(s);
          for (int i = 0; i < segments[s].bits; ++i)
            row[static_cast<std::size_t>(key_bit(segments[s], c, i))] = codes[channel] >> i & 1;
        }
      std::vector<double> found(128), expected;
      for (int x = 0; x < bits_of_product; ++x) {
        const std::size_t at = static_cast<std::size_t>(head * bits_of_product + x);
        if (rows.weights[at] == 0.0f) continue;
        int bit = 0;
        if (x / 32 < row_words)
          bit = row[static_cast<std::size_t>(x)];
        else
          for (int i = 0; i < 3; ++i)
            bit ^= row[static_cast<std::size_t>(program.planes[x / 32 - row_words][i] + x % 32)];
        const std::uint16_t channel = rows.sources[at];
        found[channel] += static_cast<double>(rows.weights[at]) * (bit - 0.5);
        for (int scale = 0; scale < kMostSegments; ++scale)
          CHECK((program.masks[scale][x / 32] >> x % 32 & 1) == (scale == scale_of[channel] ? 1u : 0u));
      }
      for (std::size_t c = 0; c < 128; ++c) {
        const int width = plan.allocation->channel_bits[static_cast<std::size_t>(head) * 128 + c];
        const std::vector<float>& table = std::get<CodebookCoder>(plan.coder).tables.at(width);
        const double gain = one_scale ? static_cast<double>(plan.allocation->gain(head, width)) : 1.0;
        CHECK(found[c] ==
              Approx(gain * static_cast<double>(table[static_cast<std::size_t>((head << width) + codes[c])])));
      }
    }
    for (int i = 0; i < kMostSegments * kMostSegmentChunks; ++i) {
      std::uint32_t any = 0;
      for (int word = 0; word < 8; ++word)
        any |= program.masks[i / kMostSegmentChunks][i % kMostSegmentChunks * 8 + word];
      CHECK((program.active >> i & 1) == (any != 0 ? 1u : 0u));
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
  CHECK(reads(widths_of({{4, 96}, {0, 32}}), same));  // 12 derived words
  CHECK(reads(widths_of({{4, 64}, {2, 64}}), same));
  CHECK_FALSE(reads(widths_of({{4, 33}, {3, 72}, {2, 15}, {1, 8}}), same));  // 387 bits
  // Rows of 8 words, beside which the other head's are of 2 bits.
  const auto two_bits = [](TensorPlan& plan, CodebookCoder&) {
    std::fill(plan.allocation->channel_bits.begin() + 128, plan.allocation->channel_bits.end(), std::uint8_t{2});
  };
  CHECK(reads(widths_of({{3, 20}, {2, 88}, {1, 20}}), two_bits));
  CHECK(reads(widths_of({{4, 64}, {0, 64}}), two_bits));                 // 8 derived words
  CHECK_FALSE(reads(widths_of({{4, 43}, {3, 28}, {0, 57}}), two_bits));  // 9
  CHECK_FALSE(reads(widths_of({{3, 40}, {2, 90}}), two_bits));           // 10 words
  // 5 bits: a codebook of any levels is not read, one of equal distances is.
  const std::vector<std::uint8_t> wide = widths_of({{5, 8}, {3, 112}, {1, 8}});
  CHECK_FALSE(reads(wide, same));
  CHECK_FALSE(reads(wide, [](TensorPlan&, CodebookCoder& coder) {
    coder.tables[5] = odd_table(5, 1.0), coder.tables[5].resize(64, 9.0f);
  }));
  CHECK(reads(wide, [](TensorPlan&, CodebookCoder& coder) {
    for (int i = 0; i < 64; ++i) coder.tables[5].push_back(0.1f * static_cast<float>(2 * (i % 32) - 31));
  }));
  CHECK_FALSE(reads(kMixed, [](TensorPlan&, CodebookCoder& coder) { coder.tables.at(3)[0] -= 0.1f; }));
  CHECK_FALSE(reads(kMixed, [](TensorPlan&, CodebookCoder& coder) { coder.scale_type = ScaleType::fp32; }));
  CHECK_FALSE(reads(kMixed, [](TensorPlan& plan, CodebookCoder&) { plan.centroids = Centroids{.count = 9}; }));
  CHECK(segment_rows(segment_plan(widths_of({{4, 128}}), kEqual), 2, 128).programs.empty());
}

TEST_CASE("Block-GTQ of 2 and 3 bits has decode kernels", "[plan]") {
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
  CHECK(decode() == KernelKind::tuned);
  plan.k.allocation->segment_gain.assign(2 * kGainWidths, 1.0f);
  CHECK(cache_format_name(plan) == "w12n1c/w12n1t3");
  CHECK(decode() == KernelKind::tuned);
  plan.k = segment_plan(widths_of({{5, 8}, {3, 112}, {1, 8}}), kEqual);
  CHECK(decode() == KernelKind::generic);
  // Of 2 bits, beside values whose rows are linear.
  plan.k = segment_plan(widths_of({{3, 20}, {2, 88}, {1, 20}}), widths_of({{2, 128}}));
  CHECK(decode() == KernelKind::generic);
  plan.v->coder = CodebookCoder{.bits = 2, .group_size = 128, .tables = {{2, odd_table(2, 1.0)}}};
  CHECK(cache_format_name(plan) == "w8n3c/w8n1");
  CHECK(decode() == KernelKind::tuned);
}
