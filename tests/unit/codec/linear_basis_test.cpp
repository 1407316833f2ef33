#include <kvq/codec/linear_basis.h>
#include <kvq/codec/row_codec.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/plan/linear_rows.h>

#include "support/row_plans.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using namespace kvq;
using test::Random;

namespace {

/// Makes all tables of a plan exactly symmetric about 0.
void make_symmetric(TensorPlan& plan) {
  auto* coder = std::get_if<CodebookCoder>(&plan.coder);
  if (!coder) return;
  for (auto& [width, table] : coder->tables)
    for (std::size_t c = 0; c < table.size() / 2; ++c) table[c] = -table[table.size() - 1 - c];
}

/// Compares s Theta b with what the codec decodes, for random codes.
void check_basis(const TensorPlan& plan, int dim, Random& random) {
  REQUIRE(is_linear(plan, 0, dim));
  const RowCodec codec(plan, 0, dim);
  const std::vector<BitSegment> segments = bit_segments(plan, 0, dim);
  int row_bits = 32;  // and a word more
  for (const BitSegment& segment : segments) row_bits += segment.channels * segment.bits;
  row_bits = (row_bits + 31) / 32 * 32;
  const auto d = static_cast<std::size_t>(dim), bits = static_cast<std::size_t>(row_bits);
  std::vector<std::uint8_t> codes(d, 0);
  for (const BitSegment& segment : segments)
    for (int c = 0; c < segment.channels; ++c)
      codes[static_cast<std::size_t>(segment.first_channel + c)] =
          static_cast<std::uint8_t>(random.integer(0, (1 << segment.bits) - 1));
  const float scale = 0.37f;
  const std::vector<float> numbers(static_cast<std::size_t>(codec.num_numbers()), scale);
  std::vector<float> expected(d);
  codec.decode(codes, numbers, expected);
  for (const Side side : kSides) {
    const std::vector<double> basis = linear_basis(plan, 0, dim, side, row_bits);
    std::vector<double> b(bits, -0.5);
    std::vector<int> used(bits, 0);
    for (const BitSegment& segment : segments)
      for (int c = 0; c < segment.channels; ++c)
        for (int i = 0; i < segment.bits; ++i) {
          const auto place =
              static_cast<std::size_t>(side == Side::k ? key_bit(segment, c, i) : value_bit(segment, c, i));
          ++used[place];
          if (codes[static_cast<std::size_t>(segment.first_channel + c)] >> i & 1) b[place] = 0.5;
        }
    double wrong = 0.0;
    for (std::size_t j = 0; j < d; ++j) {
      double sum = 0.0, magnitudes = 1e-30;
      for (std::size_t x = 0; x < bits; ++x) {
        sum += basis[j * bits + x] * b[x], magnitudes += std::abs(basis[j * bits + x]);
        if (used[x] == 0) REQUIRE(basis[j * bits + x] == 0.0);
      }
      wrong = std::max(wrong, std::abs(static_cast<double>(expected[j]) - 0.37f * sum) / magnitudes);
    }
    CHECK(wrong < 1e-6);
  }
}

}  // namespace

TEST_CASE("The basis of linear rows times their bits is what the codec decodes", "[codec]") {
  Random random(61);
  int checked = 0;
  for (int n = 0; n < 300; ++n) {
    const int dim = std::vector{16, 64, 72, 128}[static_cast<std::size_t>(random.integer(0, 3))], coder = n % 3;
    std::vector<std::uint8_t> widths = test::descending_widths(random, dim);
    if (coder == 1)
      for (std::uint8_t& width : widths) width = std::min<std::uint8_t>(width, 2);
    TensorPlan plan = test::mixed_plan(widths, dim, coder, ScaleType::fp16, static_cast<std::uint64_t>(n));
    make_symmetric(plan);
    INFO("plan " << n << ", coder " << coder << ", dim " << dim);
    const bool one_segment = bit_segments(plan, 0, dim).size() <= 1;
    CHECK(is_linear(plan, 0, dim) == one_segment);
    if (!one_segment || random.integer(0, 1) == 0) test::add_row_scale(plan, static_cast<std::uint64_t>(n));
    check_basis(plan, dim, random);
    ++checked;
  }
  for (int bits = 1; bits <= 8; ++bits)
    for (TensorPlan& plan : test::plain_plans(bits, 64, ScaleType::fp32)) {
      make_symmetric(plan);
      if (is_linear(plan, 0, 64)) check_basis(plan, 64, random), ++checked;
    }
  CHECK(checked > 300);
}

TEST_CASE("Rows that are not linear in their bits, or have several numbers, are told apart", "[codec]") {
  const auto linear = [](const TensorPlan& plan, int dim = 64) { return is_linear(plan, 0, dim); };
  for (int bits = 1; bits <= 8; ++bits) {
    const std::vector<TensorPlan> plans = test::plain_plans(bits, 64, ScaleType::fp16);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      INFO("bits " << bits << ", plan " << i);
      TensorPlan plan = plans[i];
      CHECK(linear(plan) == (i == 2 || i == 4));  // symmetric, trellis
      CHECK_FALSE(linear(plan, 128));             // two groups
      make_symmetric(plan);
      CHECK(linear(plan) == (i == 2 || i == 4 || (i == 3 && bits <= 2)));
      test::add_centroids(plan, 64, 3, 1);
      CHECK_FALSE(linear(plan));
    }
  }
  CHECK_FALSE(linear(TensorPlan{}));
  CHECK(is_linear_table(std::vector{-3.0f, -1.0f, 1.0f, 3.0f}));
  CHECK(is_linear_table(std::vector{-1.51f, -0.453f, 0.45300004f, 1.51f}));
  CHECK_FALSE(is_linear_table(std::vector{-1.51f, -0.453f, 0.4531f, 1.51f}));
  CHECK(is_linear_table(std::vector{-7.0f, -5.0f, -3.0f, -1.0f, 1.0f, 3.0f, 5.0f, 7.0f}));
  CHECK_FALSE(is_linear_table(std::vector{-7.0f, -5.0f, -3.0f, -1.5f, 1.5f, 3.0f, 5.0f, 7.0f}));
}

TEST_CASE("All heads of a side must be linear", "[codec]") {
  CodebookCoder coder{.bits = 2, .group_size = 64, .per_head = true};
  coder.tables[2] = {-3.0f, -1.0f, 1.0f, 3.0f, -3.0f, -1.0f, 1.0f, 4.0f};
  TensorPlan plan;
  plan.coder = coder;
  CHECK(is_linear(plan, 0, 64));
  CHECK_FALSE(is_linear(plan, 1, 64));
  CHECK(has_linear_rows(plan, 1, 64));
  CHECK_FALSE(has_linear_rows(plan, 2, 64));
}
