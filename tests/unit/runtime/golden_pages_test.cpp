#include <kvq/core/dtype.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/golden_pages.h>

#include "support/served_artifact.h"

#include <fmt/core.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <utility>

using namespace kvq;
using Catch::Matchers::Contains;

TEST_CASE("Golden rows come back from their pages, at every page size", "[runtime]") {
  const Artifact artifact = test::served_artifact({}, 37);
  for (const LayerPlan& plan : artifact.layers)
    for (const int page_size : {16, 32, 64, 128}) {
      CAPTURE(plan.layer, page_size);
      const PageLayout layout = page_layout_of(plan, page_size);
      const GoldenRows& rows = artifact.golden.at(plan.layer);
      const std::vector<std::byte> pages = golden_pages(plan, layout, rows);
      const PageDifference difference = compare_pages(plan, layout, rows, pages);
      CHECK(difference.rows == 2 * 37 * 4);
      CHECK(difference.firm_rows > difference.rows / 4);
      CHECK(difference.first == "");
      CHECK(difference.firm_faults + difference.soft_faults == 0);
    }
}

TEST_CASE("Each damaged byte of a golden row is seen", "[runtime]") {
  const Artifact artifact = test::served_artifact({}, 20);
  const LayerPlan& plan = artifact.layers[0];
  const PageLayout layout = page_layout_of(plan, 32);
  GoldenRows rows = artifact.golden.at(0);
  const std::vector<std::byte> pages = golden_pages(plan, layout, rows);
  for (auto& side : {&rows.k, &rows.v})
    for (std::size_t i = 0; i < side->bytes.size(); i += 7) {
      const bool firm = side->firm[i / 36];
      side->bytes[i] ^= 1;
      const PageDifference difference = compare_pages(plan, layout, rows, pages);
      CAPTURE(i, firm);
      CHECK(difference.firm_faults == firm);
      if (firm) CHECK_THAT(difference.first, Contains(fmt::format("of token {} head {}", i / 36 / 4, i / 36 % 4)));
      side->bytes[i] ^= 1;
    }
}

TEST_CASE("Rows that are not firm may be one step away, not further", "[runtime]") {
  const Artifact artifact = test::served_artifact({}, 4);
  const LayerPlan& plan = artifact.layers[1];  // symmetric, so the step of a code is its scale
  const PageLayout layout = page_layout_of(plan, 16);
  GoldenRows rows = artifact.golden.at(1);
  std::fill(rows.k.firm.begin(), rows.k.firm.end(), std::uint8_t{0});
  const std::vector<std::byte> pages = golden_pages(plan, layout, rows);
  const std::uint8_t first = rows.k.bytes[0];
  const auto faults = [&](unsigned code) {
    rows.k.bytes[0] = static_cast<std::uint8_t>((first & ~3u) | code);
    const PageDifference difference = compare_pages(plan, layout, rows, pages);
    rows.k.bytes[0] = first;
    return difference.soft_faults;
  };
  const unsigned code = first & 3u;
  CHECK(faults(code) == 0);
  CHECK(faults(code == 3 ? 2 : code + 1) == 0);
  CHECK(faults(code < 2 ? 3 : 0) == 1);
}

TEST_CASE("Golden rows in fp16 are the same numbers; rows that it rounds are not firm", "[runtime]") {
  const Artifact artifact = test::served_artifact({}, 20);
  GoldenRows rows = artifact.golden.at(0);
  std::fill(rows.k.firm.begin(), rows.k.firm.end(), std::uint8_t{1});
  const auto head = [](std::size_t row) { return row * 128; };  // index of the first element
  rows.tokens.k[head(3)] =
      float_to_bf16(0x1.02p-17f);  // the smallest fp16 number with all significant bits of bfloat16
  rows.tokens.k[head(5) + 127] = float_to_bf16(0x1.02p-18f);
  rows.tokens.v[0] = float_to_bf16(0x1.fep15f);
  const std::optional<GoldenRows> half = golden_in_fp16(rows);
  REQUIRE(half);
  for (std::size_t row = 0; row < rows.k.firm.size(); ++row) {
    bool same = true;
    for (std::size_t i = head(row); i < head(row + 1); ++i)
      same = same && f16_to_float(half->tokens.k[i]) == bf16_to_float(rows.tokens.k[i]);
    CAPTURE(row);
    CHECK(half->k.firm[row] == same);
    if (row == 3) CHECK(same);
    if (row == 5) CHECK_FALSE(same);
  }
  CHECK(f16_to_float(half->tokens.v[0]) == 0x1.fep15f);
  CHECK(half->k.bytes == rows.k.bytes);
  CHECK(half->out == rows.out);

  for (std::vector<std::uint16_t>* bits : {&rows.tokens.q, &rows.tokens.k, &rows.tokens.v}) {
    const std::uint16_t before = std::exchange(bits->back(), float_to_bf16(-0x1p16f));
    CHECK_FALSE(golden_in_fp16(rows));
    bits->back() = before;
    CHECK(golden_in_fp16(rows));
  }
}
