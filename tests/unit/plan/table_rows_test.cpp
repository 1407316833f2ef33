#include <kvq/plan/layer_pages.h>
#include <kvq/plan/serving.h>
#include <kvq/plan/table_rows.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

using namespace kvq;

namespace {

/// Symmetric about 0.
std::vector<float> odd_table(int bits) {
  std::vector<float> table;
  const int half = 1 << (bits - 1);
  for (int i = -half; i < half; ++i) {
    const double x = i < 0 ? -1.0 - i : i;
    table.push_back(static_cast<float>((i < 0 ? -1.0 : 1.0) * (0.2 + 0.4 * x + 0.05 * x * x)));
  }
  return table;
}

TensorPlan table_plan(int bits) {
  TensorPlan plan;
  plan.coder = CodebookCoder{.bits = bits, .group_size = 128, .tables = {{bits, odd_table(bits)}}};
  return plan;
}

}  // namespace

TEST_CASE("A codebook that is symmetric about 0 is the sum of its odd sets of bits", "[plan]") {
  for (const int bits : {3, 4}) {
    std::set<int> sets;
    for (int i = 0; i < odd_sets(bits); ++i) {
      CHECK(std::popcount(static_cast<unsigned>(odd_set(bits, i))) == (i < bits ? 1 : 3));
      sets.insert(odd_set(bits, i));
    }
    CHECK(sets.size() == static_cast<std::size_t>(odd_sets(bits)));
    CHECK(*sets.rbegin() < 1 << bits);

    std::vector<float> table = odd_table(bits);
    const std::vector<double> weights = odd_weights(table);
    for (std::size_t c = 0; c < table.size(); ++c) {
      double value = 0.0;  // bit by bit, as kernels do
      for (int i = 0; i < odd_sets(bits); ++i) {
        int x = 0;
        for (int bit = 0; bit < bits; ++bit)
          if (odd_set(bits, i) >> bit & 1) x ^= static_cast<int>(c >> bit & 1);
        value += weights[static_cast<std::size_t>(i)] * (x - 0.5);
      }
      CHECK(value == Approx(table[c]));
    }
    CHECK(is_odd_table(table));
    table.back() *= 1.0001f;
    CHECK_FALSE(is_odd_table(table));
  }
}

TEST_CASE("Words of odd sets and channels of values are permutations", "[plan]") {
  for (const int bits : {3, 4}) {
    std::set<std::pair<int, int>> words;
    for (int w = 0; w < table_words(bits); ++w) {
      const TableWord word = table_word(bits, w);
      CHECK(word.unit < kTableUnits);
      CHECK(word.set < odd_sets(bits));
      words.insert({word.unit, word.set});
      // The first words are those of the row: of unit u, bit i is word u b + i (pages.md, "Bit tiles").
      if (word.set < bits) CHECK(key_bit({bits, 0, 128, 0}, 32 * word.unit + 5, word.set) == 32 * w + 5);
    }
    CHECK(words.size() == static_cast<std::size_t>(table_words(bits)));
    std::set<int> channels;
    for (int place = 0; place < 128; ++place) channels.insert(table_value_channel(bits, place));
    CHECK(channels.size() == 128);
    CHECK(*channels.rbegin() == 127);
  }
}

TEST_CASE("Rows that tuned kernels for codebook codes read", "[plan]") {
  for (const int bits : {3, 4}) CHECK(table_bits(table_plan(bits), 128) == bits);
  CHECK(table_bits(table_plan(3), 64) == 0);
  const auto bits_of = [](auto change) {
    TensorPlan plan = table_plan(3);
    change(plan, std::get<CodebookCoder>(plan.coder));
    return table_bits(plan, 128);
  };
  CHECK(bits_of([](TensorPlan&, CodebookCoder& coder) { coder.group_size = 64; }) == 0);
  CHECK(bits_of([](TensorPlan&, CodebookCoder& coder) { coder.scale_type = ScaleType::fp32; }) == 0);
  CHECK(bits_of([](TensorPlan&, CodebookCoder& coder) { coder.scale_type = ScaleType::bf16; }) == 3);
  CHECK(bits_of([](TensorPlan& plan, CodebookCoder&) { plan.centroids = Centroids{.count = 9}; }) == 0);
  CHECK(bits_of([](TensorPlan&, CodebookCoder& coder) { coder.tables.at(3)[7] += 0.01f; }) == 0);
  CHECK(bits_of([](TensorPlan&, CodebookCoder& coder) {
          coder.per_head = true;
          std::vector<float>& tables = coder.tables.at(3);
          const std::vector<float> first = tables;
          for (const float x : first) tables.push_back(2.0f * x + 0.5f);  // of the second head, about 0.5
        }) == 0);
}

TEST_CASE("Weights are those of each head's own codebook", "[plan]") {
  TensorPlan plan = table_plan(3);
  auto& coder = std::get<CodebookCoder>(plan.coder);
  plan.rotation.scope = Scope::kv_head, coder.per_head = true;
  for (const float x : odd_table(3)) coder.tables.at(3).push_back(2.0f * x);
  const std::vector<float> weights = table_weights(plan, 2, 128);
  REQUIRE(weights.size() == 8);
  for (std::size_t i = 0; i < 4; ++i) CHECK(weights[4 + i] == 2.0f * weights[i]);
  const std::vector<LevelTable> levels = level_tables(plan, 2, 128);
  REQUIRE(levels.size() == 2);
  CHECK(levels[1].step == 2.0f * levels[0].step);
  CHECK(std::equal(std::begin(levels[0].levels), std::end(levels[0].levels), levels[1].levels));
  CHECK(table_weights(table_plan(3), 64, 64).empty());
}

TEST_CASE("Levels of codebooks are integers of 8 bits", "[plan]") {
  const auto level = [](const LevelTable& table, std::size_t code) {
    return static_cast<int>(static_cast<std::int8_t>(table.levels[code / 4] >> 8 * (code % 4)));
  };
  for (const int bits : {3, 4}) {  // steps of 0.05
    const std::vector<float> table = odd_table(bits);
    const auto found = level_table(table);
    REQUIRE(found);
    for (std::size_t c = 0; c < table.size(); ++c)
      CHECK(static_cast<float>(level(*found, c)) * found->step == Approx(table[c]));
    for (std::size_t c = table.size(); c < 16; ++c) CHECK(level(*found, c) == 0);
  }
  CHECK(level(level_table(std::vector{-0.8f, 0.8f}).value(), 1) == 127);  // the largest that fit
  CHECK(level_table(std::vector{-127.0f, 126.0f}));
  CHECK_FALSE(level_table(std::vector{-128.0f, 127.0f}));  // no step
  CHECK_FALSE(level_table(std::vector{-1.0f, 0.49999f}));
  CHECK_FALSE(level_table(std::vector{0.0f, 0.0f}));
  CHECK_FALSE(level_table(std::vector{-1.0f, INFINITY}));
  CHECK_FALSE(level_table(std::vector{NAN, 1.0f}));
  CHECK_FALSE(level_table(std::vector<float>(32, 1.0f)));
}

TEST_CASE("A codebook on a grid of levels is near the one that was asked for", "[plan]") {
  // Max, Quantizing for minimum distortion, table I, 4 bits.
  const std::vector<double> upper = {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733};
  std::vector<double> entries(upper.rbegin(), upper.rend());
  for (double& x : entries) x = -x;
  entries.insert(entries.end(), upper.begin(), upper.end());
  const std::vector<float> table = level_grid(entries);
  const auto levels = level_table(table);
  REQUIRE(levels);
  double worst = 0.0;
  for (std::size_t c = 0; c < 16; ++c) {
    CHECK(table[c] == -table[15 - c]);
    worst = std::max(worst, std::abs(static_cast<double>(table[c]) - entries[c]));
  }
  CHECK(worst < 0.5 * 2.733 / 100);
  CHECK(is_odd_table(table));
  // Other sizes are kept: five bits, and a codebook that has levels already.
  const std::vector<double> five(32, 0.123456789);
  CHECK(level_grid(five) == std::vector<float>(32, 0.123456789f));
  CHECK(level_grid(std::vector{-1.0, 1.0}) == std::vector{-1.0f, 1.0f});
  // Entries of a fitted codebook may lie on one side.
  CHECK(level_table(level_grid(std::vector{0.1, 0.7, 1.3, 2.9})));
}

TEST_CASE("Codebook codes of 3 and 4 bits have decode kernels", "[plan]") {
  LayerPlan plan{
      .layer = 0,
      .geometry = {.num_q_heads = 4, .num_kv_heads = 1, .head_dim = 128, .v_head_dim = 128, .softmax_scale = 1.0},
      .k = table_plan(3),
      .v = table_plan(3),
  };
  const auto decode = [&] { return served_by(plan, Activation::bf16).by(KernelVerb::decode); };
  CHECK(cache_format_name(plan) == "w12n1t3");
  CHECK(decode() == KernelKind::tuned);
  CHECK(served_by(plan, Activation::bf16).by(KernelVerb::dequantize) == KernelKind::tuned);
  plan.k = table_plan(4), plan.v = table_plan(4);
  CHECK(cache_format_name(plan) == "w16n1t4");
  CHECK(decode() == KernelKind::tuned);
  std::get<CodebookCoder>(plan.k.coder).tables.at(4)[0] -= 0.1f;
  CHECK(cache_format_name(plan) == "w16n1/w16n1t4");
  CHECK(decode() == KernelKind::generic);
}
