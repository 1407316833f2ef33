#include <kvq/codec/codec.h>

#include "support/compare.h"
#include "support/packing_reference.h"
#include "support/random_data.h"
#include "support/schemes.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <ostream>

using namespace kvq;

namespace {

/// A random uniform scheme and a row: a few groups of any size; numbers of one magnitude, of all magnitudes, or
/// repeated.
struct Row {
  UniformCoder coder;
  double clip = 1.0;
  std::vector<float> x;
};

std::ostream& operator<<(std::ostream& out, const Row& row) {
  out << test::describe(row.coder) << ", clip " << row.clip << ", x:" << std::hexfloat;
  for (const float x : row.x) out << ' ' << x;
  return out;
}

UniformCoder any_coder() {
  UniformCoder coder{.bits = *rc::gen::inRange(1, 9), .group_size = *rc::gen::element(1, 2, 3, 5, 8, 12, 31, 32, 64)};
  coder.rule = *rc::gen::element(ScaleRule::minmax, ScaleRule::minmax, ScaleRule::absmax, ScaleRule::least_squares,
                                 ScaleRule::norm);
  coder.levels = coder.rule == ScaleRule::minmax ? UniformLevels::affine : UniformLevels::symmetric;
  coder.scale_type = *rc::gen::element(ScaleType::fp16, ScaleType::bf16, ScaleType::fp32);
  coder.zero = *rc::gen::element(ZeroKind::floating, ZeroKind::integer);
  if (coder.levels == UniformLevels::symmetric) coder.zero = ZeroKind::floating;
  return coder;
}

rc::Gen<float> ordinary_number() {
  return rc::gen::map(rc::gen::inRange(-1'000'000, 1'000'001), [](int n) { return static_cast<float>(n) * 1e-5f; });
}
rc::Gen<float> finite_number() {
  const auto bits = rc::gen::map(rc::gen::arbitrary<std::uint32_t>(), [](std::uint32_t pattern) {
    const float number = std::bit_cast<float>(pattern);
    return std::isfinite(number) ? number : 0.0f;
  });
  return rc::gen::oneOf(bits, rc::gen::element(0.0f, -0.0f, 1.0f, -1.0f, 3.4e38f, -3.4e38f, 1e-45f, 65504.0f, 6e-8f));
}

rc::Gen<Row> row_of(const rc::Gen<float>& number) {
  return rc::gen::exec([number] {
    Row row{.coder = any_coder(), .x = {}};
    const int groups = *rc::gen::inRange(1, 4);
    row.x = *rc::gen::container<std::vector<float>>(static_cast<std::size_t>(groups * row.coder.group_size), number);
    if (row.coder.rule == ScaleRule::minmax) row.clip = *rc::gen::element(1.0, 1.0, 0.99, 0.9, 0.5, 0.01);
    return row;
  });
}

struct Coded {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers, decoded;
};
Coded coded(const Row& row) {
  Coded result{std::vector<std::uint8_t>(row.x.size()),
               std::vector<float>(static_cast<std::size_t>(numbers_per_row(row.coder, static_cast<int>(row.x.size())))),
               std::vector<float>(row.x.size())};
  encode_row(row.coder, row.clip, row.x, result.codes, result.numbers);
  decode_row(row.coder, result.codes, result.numbers, result.decoded);
  return result;
}

/// Unit roundoff of a scale type.
double roundoff(ScaleType type) {
  return type == ScaleType::fp16 ? 0x1p-11 : type == ScaleType::bf16 ? 0x1p-8 : 0x1p-24;
}

}  // namespace

TEST_CASE("Any finite row is coded as the text of the format says, bit for bit", "[codec][property]") {
  const auto same = [](const Row& row) {
    const Coded found = coded(row);
    const test::ReferenceRow expected = test::reference_row(row.coder, row.clip, row.x);
    RC_ASSERT(found.codes == expected.codes);
    RC_ASSERT(test::first_bit_difference(found.numbers, expected.numbers) == "");
    RC_ASSERT(test::first_bit_difference(found.decoded, expected.decoded) == "");
  };
  constexpr int kRowsPerCase = 10;
  rc::prop("ordinary numbers", [same] {
    for (int i = 0; i < kRowsPerCase; ++i) same(*row_of(ordinary_number()));
  });
  rc::prop("all patterns", [same] {
    for (int i = 0; i < kRowsPerCase; ++i) same(*row_of(finite_number()));
  });
}

TEST_CASE("A row with a channel that is not finite has codes 0 and NaN in all its numbers", "[codec][property]") {
  rc::prop("some channels of any row", [] {
    Row row = *row_of(finite_number());
    test::Random random(*rc::gen::arbitrary<std::uint64_t>());
    test::spoil(row.x, random);
    const Coded found = coded(row);
    const test::ReferenceRow expected = test::reference_row(row.coder, row.clip, row.x);
    RC_ASSERT(found.codes == std::vector<std::uint8_t>(row.x.size(), 0));
    RC_ASSERT(test::first_bit_difference(found.numbers, expected.numbers) == "");
    for (const float number : found.numbers) RC_ASSERT(std::bit_cast<std::uint32_t>(number) == 0x7fc00000u);
    for (const float x : found.decoded) RC_ASSERT(std::isnan(x));
  });
}

TEST_CASE("Codes are below 2^bits, numbers are of the scale type, and coding again gives the same",
          "[codec][property]") {
  rc::prop("any finite row", [] {
    const Row row = *row_of(finite_number());
    const Coded first = coded(row), second = coded(row);
    RC_ASSERT(first.codes == second.codes);
    RC_ASSERT(test::first_bit_difference(first.numbers, second.numbers) == "");
    for (const std::uint8_t code : first.codes) RC_ASSERT(static_cast<int>(code) < 1 << row.coder.bits);
    for (const float number : first.numbers) {
      RC_ASSERT(std::isfinite(number));
      RC_ASSERT(round_to(row.coder.scale_type, number) == number);
    }
    const auto scales = row.x.size() / static_cast<std::size_t>(row.coder.group_size);
    for (std::size_t g = 0; g < scales; ++g) RC_ASSERT(!std::signbit(first.numbers[g]));
  });
}

TEST_CASE("A row survives its bytes", "[codec][property]") {
  rc::prop("any finite row", [] {
    const Row row = *row_of(finite_number());
    const Coded first = coded(row);
    std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(row.coder, static_cast<int>(row.x.size()))));
    pack_row(row.coder, first.codes, first.numbers, bytes);
    std::vector<std::uint8_t> codes(first.codes.size());
    std::vector<float> numbers(first.numbers.size());
    unpack_row(row.coder, bytes, codes, numbers);
    RC_ASSERT(codes == first.codes);
    RC_ASSERT(test::first_bit_difference(numbers, first.numbers) == "");
  });
  rc::prop("any codes of any width and length", [] {
    const int bits = *rc::gen::inRange(1, 9);
    const auto codes = *rc::gen::container<std::vector<std::uint8_t>>(
        rc::gen::map(rc::gen::inRange(0, 1 << bits), [](int n) { return static_cast<std::uint8_t>(n); }));
    std::vector<std::byte> bytes((codes.size() * static_cast<std::size_t>(bits) + 7) / 8);
    std::vector<std::uint8_t> back(codes.size());
    pack_codes(codes, bits, bytes);
    unpack_codes(bytes, bits, back);
    RC_ASSERT(back == codes);
  });
}

TEST_CASE("An affine group is off by at most half a step and what rounding its numbers costs", "[codec][property]") {
  rc::prop("ordinary rows without clip", [] {
    Row row = *row_of(ordinary_number());
    RC_PRE(row.coder.levels == UniformLevels::affine);
    row.clip = 1.0;
    const Coded found = coded(row);
    const auto size = static_cast<std::size_t>(row.coder.group_size), groups = row.x.size() / size;
    const double n = std::pow(2.0, row.coder.bits) - 1.0;
    for (std::size_t g = 0; g < groups; ++g) {
      const auto [low, high] = std::minmax_element(row.x.begin() + static_cast<std::ptrdiff_t>(g * size),
                                                   row.x.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
      const double lo = *low, hi = *high, s = found.numbers[g], second = found.numbers[groups + g];
      if (s == 0.0) continue;  // the range is too small for the scale type
      // Levels reach from `bottom` to `top`; outside, the error grows with the distance.
      const double bottom = row.coder.zero == ZeroKind::floating ? second : -second * s;
      const double reach = std::max({0.0, bottom - lo, hi - (bottom + n * s)});
      const double rounding = 8 * roundoff(ScaleType::fp32) * (std::max(std::abs(lo), std::abs(hi)) + n * s);
      for (std::size_t i = g * size; i < (g + 1) * size; ++i)
        RC_ASSERT(std::abs(static_cast<double>(row.x[i]) - static_cast<double>(found.decoded[i])) <=
                  s / 2 + reach + rounding);
      // Only rounding of scale and minimum keeps the levels from the ends. A zero-point in fp32 or of few steps is
      // exact.
      if (row.coder.zero == ZeroKind::floating)
        RC_ASSERT(reach <= roundoff(row.coder.scale_type) * (std::abs(lo) + n * s + 0x1p-14) + rounding);
    }
  });
}

TEST_CASE("Absmax never exceeds the largest magnitude, and is off by at most half a step", "[codec][property]") {
  rc::prop("ordinary rows", [] {
    Row row = *row_of(ordinary_number());
    row.coder.levels = UniformLevels::symmetric;
    row.coder.rule = ScaleRule::absmax;
    row.clip = 1.0;
    const Coded found = coded(row);
    const auto size = static_cast<std::size_t>(row.coder.group_size);
    for (std::size_t g = 0; g < row.x.size() / size; ++g) {
      double largest = 0.0;
      for (std::size_t i = g * size; i < (g + 1) * size; ++i)
        largest = std::max(largest, std::abs(static_cast<double>(row.x[i])));
      const double s = found.numbers[g],
                   slack = 2 * roundoff(row.coder.scale_type) * largest + 0x1p-14 * roundoff(ScaleType::fp16);
      if (s == 0.0) continue;
      for (std::size_t i = g * size; i < (g + 1) * size; ++i) {
        const double x = row.x[i], y = found.decoded[i];
        RC_ASSERT(std::abs(y) <= largest + (std::pow(2.0, row.coder.bits) - 1.0) * slack);
        RC_ASSERT(std::abs(x - y) <= s / 2 + (std::pow(2.0, row.coder.bits) - 1.0) * slack);
      }
    }
  });
}

TEST_CASE("Least squares is never farther from the row than norm, with the same codes", "[codec][property]") {
  rc::prop("ordinary rows, fp32 scales", [] {
    Row row = *row_of(ordinary_number());
    row.coder.levels = UniformLevels::symmetric;
    row.coder.scale_type = ScaleType::fp32;
    row.clip = 1.0;
    row.coder.rule = ScaleRule::norm;
    const Coded norm = coded(row);
    row.coder.rule = ScaleRule::least_squares;
    const Coded fitted = coded(row);
    RC_ASSERT(norm.codes == fitted.codes);
    RC_ASSERT(test::relative_difference(fitted.decoded, row.x) <=
              test::relative_difference(norm.decoded, row.x) + 1e-6);
  });
}

TEST_CASE("Clipping moves no channel that lies within the threshold", "[codec][property]") {
  rc::prop("the threshold is the order statistic, whatever the order of the channels", [] {
    const auto x = *rc::gen::nonEmpty(rc::gen::container<std::vector<float>>(finite_number()));
    RC_PRE(x.size() <= 1024u);
    const double ratio = *rc::gen::map(rc::gen::inRange(1, 1001), [](int n) { return n / 1000.0; });
    std::vector<float> sorted = x;
    std::sort(sorted.begin(), sorted.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    const auto index = std::min(static_cast<std::size_t>(ratio * static_cast<double>(x.size())), x.size() - 1);
    RC_ASSERT(clip_threshold(x, ratio) == std::abs(sorted[index]));
    RC_ASSERT(clip_threshold(sorted, ratio) == std::abs(sorted[index]));
  });
}
