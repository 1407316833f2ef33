#include <kvq/codec/codec.h>
#include <kvq/codec/row_codec.h>

#include "support/compare.h"
#include "support/row_plans.h"
#include "support/row_reference.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

#include <bit>
#include <cmath>
#include <ostream>

using namespace kvq;

namespace {

/// A plan with the codes of packing.md 1.1, and a row.
struct Row {
  TensorPlan plan;
  std::vector<float> x;
  int dim() const { return static_cast<int>(x.size()); }
};

std::ostream& operator<<(std::ostream& out, const Row& row) {
  out << coder_name(row.plan.coder) << " " << to_string(scale_rule(row.plan.coder)) << " "
      << to_string(scale_type(row.plan.coder)) << ", widths";
  if (row.plan.allocation)
    for (const std::uint8_t width : row.plan.allocation->channel_bits) out << ' ' << static_cast<int>(width);
  if (row.plan.allocation)
    for (const float gain : row.plan.allocation->segment_gain) out << " gain " << gain;
  else
    out << ' ' << code_bits(row.plan.coder) << ", group " << group_size(row.plan.coder);
  out << ", x:" << std::hexfloat;
  for (const float x : row.x) out << ' ' << x;
  return out;
}

rc::Gen<float> finite_number() {
  const auto bits = rc::gen::map(rc::gen::arbitrary<std::uint32_t>(), [](std::uint32_t pattern) {
    const float number = std::bit_cast<float>(pattern);
    return std::isfinite(number) ? number : 0.0f;
  });
  return rc::gen::oneOf(bits, rc::gen::element(0.0f, -0.0f, 1.0f, -1.0f, 3.4e38f, -3.4e38f, 1e-45f, 65504.0f, 6e-8f));
}
rc::Gen<float> ordinary_number() {
  return rc::gen::map(rc::gen::inRange(-1'000'000, 1'000'001), [](int n) { return static_cast<float>(n) * 1e-5f; });
}
rc::Gen<float> small_integer() {
  return rc::gen::map(rc::gen::inRange(-2, 3), [](int n) { return static_cast<float>(n); });
}

TensorPlan any_plan(int& dim, bool mixed) {
  const ScaleType type = *rc::gen::element(ScaleType::fp16, ScaleType::bf16, ScaleType::fp32);
  const auto seed = *rc::gen::inRange<std::uint64_t>(0, 100000);
  if (mixed) {
    test::Random random(seed);
    dim = *rc::gen::inRange(1, 41);
    TensorPlan plan = test::mixed_plan(test::descending_widths(random, dim), dim, *rc::gen::inRange(0, 3), type, seed);
    if (*rc::gen::inRange(0, 2) == 0) test::add_row_scale(plan, seed);
    return plan;
  }
  const int bits = *rc::gen::inRange(1, 8), group = *rc::gen::element(1, 2, 7, 8, 9, 12, 31, 33);
  const ScaleRule rule = *rc::gen::element(ScaleRule::norm, ScaleRule::rms, ScaleRule::least_squares);
  dim = group * *rc::gen::inRange(1, 3);
  TensorPlan plan;
  if (*rc::gen::inRange(0, 2) == 0)
    plan.coder = test::codebook_coder(bits, group, rule, type, seed);
  else
    plan.coder = test::trellis_coder({bits}, group, rule, type, seed, 4);
  return plan;
}

rc::Gen<Row> row_of(const rc::Gen<float>& number, bool maybe_mixed = true) {
  return rc::gen::exec([number, maybe_mixed] {
    Row row;
    int dim = 0;
    row.plan = any_plan(dim, maybe_mixed && *rc::gen::inRange(0, 2) == 0);
    row.x = *rc::gen::container<std::vector<float>>(static_cast<std::size_t>(dim), number);
    return row;
  });
}

struct Coded {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers, decoded;
};
Coded coded(const Row& row) {
  const RowCodec codec(row.plan, 0, row.dim());
  Coded result{std::vector<std::uint8_t>(row.x.size()),
               std::vector<float>(static_cast<std::size_t>(codec.num_numbers())), std::vector<float>(row.x.size())};
  codec.encode(row.x, result.codes, result.numbers);
  codec.decode(result.codes, result.numbers, result.decoded);
  return result;
}

}  // namespace

TEST_CASE("Any finite row in the codes of 1.1 is coded as the text of the format says, bit for bit",
          "[codec][property]") {
  const auto same = [](const Row& row) {
    const Coded found = coded(row);
    const test::ReferenceBytes expected = test::reference_plan_row(row.plan, 0, 0, row.x);
    RC_ASSERT(found.codes == expected.codes);
    RC_ASSERT(test::first_bit_difference(found.numbers, expected.numbers) == "");
    RC_ASSERT(test::first_bit_difference(found.decoded, expected.decoded) == "");
  };
  rc::prop("ordinary numbers", [same] { same(*row_of(ordinary_number())); });
  rc::prop("numbers full of ties", [same] { same(*row_of(small_integer())); });
  rc::prop("all patterns", [same] { same(*row_of(finite_number())); });
}

TEST_CASE("A row of 1.1 codes is poisoned if and only if a channel is not finite", "[codec][property]") {
  rc::prop("some channels of any row", [] {
    Row row = *row_of(finite_number());
    const Coded before = coded(row);
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    test::spoil(row.x, random);
    const Coded found = coded(row);
    const test::ReferenceBytes expected = test::reference_plan_row(row.plan, 0, 0, row.x);
    RC_ASSERT(found.codes == std::vector<std::uint8_t>(row.x.size(), 0));
    RC_ASSERT(test::first_bit_difference(found.numbers, expected.numbers) == "");
    RC_ASSERT(test::first_bit_difference(found.decoded, expected.decoded) == "");
    for (const float number : found.numbers) RC_ASSERT(std::isnan(number));
    for (const float number : before.numbers) RC_ASSERT(std::isfinite(number));
    for (const float x : found.decoded) RC_ASSERT(std::isnan(x) || found.numbers.empty());
  });
}

TEST_CASE("Any row in the codes of 1.1 survives its bytes, and its numbers are finite and of their type",
          "[codec][property]") {
  rc::prop("any finite row", [] {
    const Row row = *row_of(finite_number());
    const Coded first = coded(row);
    for (std::size_t j = 0; j < first.codes.size(); ++j) {
      const int width = row.plan.allocation ? row.plan.allocation->channel_bits[j] : code_bits(row.plan.coder);
      RC_ASSERT(static_cast<int>(first.codes[j]) < 1 << width);
    }
    for (const float number : first.numbers) {
      RC_ASSERT(std::isfinite(number));
      RC_ASSERT(round_to(scale_type(row.plan.coder), number) == number);
    }
    const RowCodec codec(row.plan, 0, row.dim());
    std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(row.plan, row.dim())), std::byte{0xcc});
    std::vector<std::uint8_t> codes(first.codes.size());
    std::vector<float> numbers(first.numbers.size());
    codec.pack(first.codes, first.numbers, 0, bytes);
    RC_ASSERT(codec.unpack(bytes, codes, numbers) == 0);
    RC_ASSERT(codes == first.codes);
    RC_ASSERT(test::first_bit_difference(numbers, first.numbers) == "");
  });
}

TEST_CASE("The norm rule keeps the length of every group of 1.1 codes", "[codec][property]") {
  rc::prop("ordinary rows in fp32", [] {
    Row row = *row_of(ordinary_number(), false);
    std::visit(
        [](auto& coder) {
          if constexpr (requires { coder.rule; }) coder.rule = ScaleRule::norm, coder.scale_type = ScaleType::fp32;
        },
        row.plan.coder);
    const Coded found = coded(row);
    const auto g = static_cast<std::size_t>(group_size(row.plan.coder));
    for (std::size_t first = 0; first < row.x.size(); first += g) {
      double before = 0.0, after = 0.0;
      for (std::size_t j = first; j < first + g; ++j) {
        before += static_cast<double>(row.x[j]) * static_cast<double>(row.x[j]);
        after += static_cast<double>(found.decoded[j]) * static_cast<double>(found.decoded[j]);
      }
      RC_ASSERT(std::abs(std::sqrt(after) - std::sqrt(before)) <= 1e-5 * std::sqrt(before));
    }
  });
}
