#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/packing_reference.h"
#include "support/random_data.h"
#include "support/schemes.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

using namespace kvq;
using Catch::Matchers::StartsWith;

namespace {

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kTiny = std::numeric_limits<float>::denorm_min();

struct NamedRow {
  const char* name;
  std::vector<float> row;
};

/// Rows of twelve channels, a multiple of the group sizes 1, 3, 4 and 12.
std::vector<NamedRow> adversarial_rows() {
  const auto filled = [](float number) { return std::vector<float>(12, number); };
  const auto with = [&](float others, std::size_t index, float number) {
    std::vector<float> row = filled(others);
    row[index] = number;
    return row;
  };
  std::vector<float> alternating(12), ramp(12), ends(12);
  for (std::size_t i = 0; i < 12; ++i) {
    alternating[i] = i % 2 ? 3.0f : -3.0f;
    ramp[i] = static_cast<float>(i) - 5.5f;
    ends[i] = i % 2 ? kMax : -kMax;
  }
  return {{"constant", filled(1.37f)},
          {"constant negative", filled(-1.37f)},
          {"zero", filled(0.0f)},
          {"negative zero", filled(-0.0f)},
          {"zeros of both signs", with(0.0f, 3, -0.0f)},
          {"one huge among small", with(0.01f, 5, 6.0e4f)},
          {"one beyond float16", with(0.01f, 5, 1.0e6f)},
          {"one largest float", with(1.0f, 7, kMax)},
          {"one smallest float", with(1.0f, 7, -kMax)},
          {"both ends", ends},
          {"all largest", filled(kMax)},
          {"all smallest", filled(-kMax)},
          {"subnormals", with(kTiny, 2, -3 * kTiny)},
          {"one subnormal", with(0.0f, 0, kTiny)},
          {"below float16's subnormals", with(1.0e-9f, 4, -1.0e-9f)},
          {"float16 subnormals", with(1.0e-6f, 4, -2.0e-6f)},
          {"range that vanishes beside the offset", with(4096.0f, 1, 4096.0005f)},
          {"alternating signs", alternating},
          {"ramp with ties", ramp},
          {"all negative", with(-5.0f, 3, -4.0f)}};
}

void check_against_reference(const UniformCoder& coder, double clip, const std::vector<float>& row) {
  const test::ReferenceRow expected = test::reference_row(coder, clip, row);
  std::vector<std::uint8_t> codes(row.size());
  std::vector<float> numbers(static_cast<std::size_t>(numbers_per_row(coder, static_cast<int>(row.size())))),
      decoded(row.size());
  encode_row(coder, clip, row, codes, numbers);
  CHECK(codes == expected.codes);
  CHECK(test::first_bit_difference(numbers, expected.numbers) == "");
  decode_row(coder, codes, numbers, decoded);
  CHECK(test::first_bit_difference(decoded, expected.decoded) == "");
}

std::vector<float> decoded_row(const UniformCoder& coder, double clip, std::vector<float> row) {
  quantize_row(coder, clip, row);
  return row;
}

double squared_length(const std::vector<float>& row) {
  double sum = 0.0;
  for (const float x : row) sum += static_cast<double>(x) * static_cast<double>(x);
  return sum;
}

}  // namespace

TEST_CASE("Adversarial rows are coded as the text of the format says, in every scheme", "[codec]") {
  for (const NamedRow& named : adversarial_rows())
    for (const int group : {1, 3, 4, 12})
      for (const UniformCoder& coder : test::all_schemes(group))
        for (const double clip : {1.0, 0.5}) {
          if (clip < 1.0 && coder.rule != ScaleRule::minmax) continue;
          INFO(named.name << ", " << test::describe(coder) << ", clip " << clip);
          check_against_reference(coder, clip, named.row);
        }
}

TEST_CASE("Rows of all magnitudes are coded as the text of the format says, in every scheme", "[codec]") {
  test::Random random(5);
  for (const int group : {1, 5, 8, 31, 64})
    for (const UniformCoder& coder : test::all_schemes(group)) {
      INFO(test::describe(coder));
      const auto dim = static_cast<std::size_t>(2 * group);
      std::vector<float> wild(dim);
      for (float& x : wild) x = test::any_finite(random);
      check_against_reference(coder, 1.0, wild);
      check_against_reference(coder, 1.0, test::gaussian(dim, random.bits()));
      if (coder.rule == ScaleRule::minmax)
        check_against_reference(coder, 0.9, test::gaussian(dim, random.bits(), 1.0e-4));
    }
}

TEST_CASE("A constant or zero row comes back as it was, up to the rounding of its number", "[codec]") {
  for (const UniformCoder& coder : test::all_schemes(4)) {
    INFO(test::describe(coder));
    CHECK(decoded_row(coder, 1.0, {0, 0, 0, 0}) == std::vector<float>{0, 0, 0, 0});
    if (coder.levels == UniformLevels::affine && coder.zero == ZeroKind::floating) {
      const float stored = round_to(coder.scale_type, -1.37f);
      CHECK(decoded_row(coder, 1.0, {-1.37f, -1.37f, -1.37f, -1.37f}) ==
            std::vector<float>{stored, stored, stored, stored});
    }
  }
}

TEST_CASE("One channel of NaN or infinity poisons the whole row, whatever its group, rule, width and clip", "[codec]") {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::signaling_NaN(),
                          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()})
    for (const std::size_t index : {0u, 3u, 7u}) {
      std::vector<float> row = {1, 2, 3, 4, 5, 6, 7, 8};
      row[index] = bad;
      for (const UniformCoder& coder : test::all_schemes(4))
        for (const double clip : {1.0, 0.5}) {
          if (clip < 1.0 && coder.rule != ScaleRule::minmax) continue;
          INFO(test::describe(coder) << ", clip " << clip << ", " << bad << " at " << index);
          check_against_reference(coder, clip, row);
          std::vector<std::uint8_t> codes(8, 255);
          std::vector<float> numbers(static_cast<std::size_t>(numbers_per_row(coder, 8)));
          encode_row(coder, clip, row, codes, numbers);
          CHECK(codes == std::vector<std::uint8_t>(8, 0));
          for (const float x : decoded_row(coder, clip, row)) CHECK(std::isnan(x));
        }
    }
}

TEST_CASE("The numbers of a poisoned row are the quiet NaN of their type", "[codec]") {
  for (const UniformCoder& coder : test::all_schemes(4)) {
    INFO(test::describe(coder));
    std::vector<std::uint8_t> codes(8, 255);
    std::vector<float> numbers(static_cast<std::size_t>(numbers_per_row(coder, 8))), back(numbers.size());
    encode_row(coder, 1.0, std::vector<float>{1, 2, 3, -std::numeric_limits<float>::infinity(), 5, 6, 7, 8}, codes,
               numbers);
    std::vector<std::byte> bytes(static_cast<std::size_t>(row_bytes(coder, 8)), std::byte{0xa5}), expected;
    pack_row(coder, codes, numbers, bytes);
    expected.resize(static_cast<std::size_t>(coder.bits));  // eight codes
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const unsigned pattern = coder.scale_type == ScaleType::fp16   ? 0x7e00u
                               : coder.scale_type == ScaleType::bf16 ? 0x7fc0u
                                                                     : 0x7fc00000u;
      for (int byte = 0; byte < scale_bytes(coder.scale_type); ++byte)
        expected.push_back(static_cast<std::byte>(pattern >> (8 * byte) & 0xffu));
    }
    CHECK(bytes == expected);
    unpack_row(coder, bytes, codes, back);
    CHECK(test::first_bit_difference(back, numbers) == "");
  }
}

TEST_CASE("A channel of NaN or infinity becomes NaN in an exact row, and changes no other", "[codec]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> row = {1, kInfinity, -kInfinity, std::bit_cast<float>(0xff800001u), kMax, -kMax, -0.0f, 2};
  quantize_exact(row);
  const std::vector<std::uint32_t> expected = {0x3f800000, 0x7fc00000, 0x7fc00000, 0x7fc00000,
                                               0x7f7f0000, 0xff7f0000, 0x80000000, 0x40000000};
  for (std::size_t i = 0; i < row.size(); ++i) CHECK(std::bit_cast<std::uint32_t>(row[i]) == expected[i]);
}

TEST_CASE("Tools refuse a row that is not finite, and name its channel", "[codec]") {
  std::vector<float> row(130, kMax);
  CHECK(is_finite(row));
  CHECK(is_finite({}));
  CHECK(test::error_text([&] { expect_finite(row); }) == "no error");
  row[129] = -std::numeric_limits<float>::infinity();
  CHECK(!is_finite(row));
  CHECK(test::error_text([&] { expect_finite(row); }) ==
        "numerical: row to encode: channel 129 is -inf, expected a finite number");
  row[7] = std::numeric_limits<float>::quiet_NaN();
  CHECK(test::error_text([&] { expect_finite(row); }) ==
        "numerical: row to encode: channel 7 is nan, expected a finite number");
}

TEST_CASE("Extents that disagree are a programmer's mistake", "[codec]") {
  const UniformCoder coder{.bits = 2, .group_size = 4};
  std::vector<float> row(8), numbers(4), out(8);
  std::vector<std::uint8_t> codes(8);
  std::vector<std::byte> bytes(10);
  CHECK_THAT(test::error_text([&] { encode_row(coder, 1.0, std::span(row).first(7), codes, numbers); }),
             StartsWith("internal: "));
  CHECK_THAT(
      test::error_text([&] { encode_row(coder, 1.0, std::span(row).first(6), std::span(codes).first(6), numbers); }),
      StartsWith("internal: "));
  CHECK_THAT(test::error_text([&] { encode_row(coder, 1.0, row, codes, std::span(numbers).first(2)); }),
             StartsWith("internal: "));
  CHECK_THAT(test::error_text([&] { decode_row(coder, codes, numbers, std::span(out).first(4)); }),
             StartsWith("internal: "));
  CHECK_THAT(test::error_text([&] { pack_row(coder, codes, numbers, std::span(bytes).first(9)); }),
             StartsWith("internal: "));
  CHECK_THAT(test::error_text([&] { unpack_row(coder, std::span(bytes).first(9), codes, numbers); }),
             StartsWith("internal: "));
}

TEST_CASE("The clip threshold is the sorted magnitude at floor(rho D), at most the last", "[codec]") {
  test::Random random(9);
  for (const int dim : {1, 2, 3, 7, 64, 100, 128})
    for (const double ratio : {0.001, 0.1, 0.5, 0.7, 0.85, 0.92, 0.96, 0.99, 0.999, 1.0}) {
      const std::vector<float> row = test::gaussian(static_cast<std::size_t>(dim), random.bits());
      std::vector<float> magnitudes;
      for (const float x : row) magnitudes.push_back(std::abs(x));
      std::sort(magnitudes.begin(), magnitudes.end());
      const auto index =
          std::min<std::size_t>(static_cast<std::size_t>(ratio * dim), static_cast<std::size_t>(dim - 1));
      INFO("dim " << dim << ", ratio " << ratio);
      CHECK(clip_threshold(row, ratio) == magnitudes[index]);
    }
  CHECK(clip_threshold(std::vector<float>{-4, 3, 3, -1}, 0.5) == 3.0f);   // equal magnitudes
  CHECK(clip_threshold(std::vector<float>{-4, 3, 2, -1}, 0.75) == 4.0f);  // the product is exactly three
}

TEST_CASE("The clip is taken over the whole row, not over a group", "[codec]") {
  const UniformCoder coder{.bits = 8, .group_size = 2, .scale_type = ScaleType::fp32};
  // rho * D = 2: the clip threshold of both groups is the third smallest magnitude, 3.
  const std::vector<float> found = decoded_row(coder, 0.5, {10, -1, 3, 2});
  CHECK(test::largest_difference(found, std::vector<float>{3, -1, 3, 2}) < 0.01);
}

TEST_CASE("The norm rule keeps the length of every group", "[codec]") {
  for (int bits = 1; bits <= 8; ++bits)
    for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32})
      for (std::uint64_t seed = 0; seed < 20; ++seed) {
        const UniformCoder coder{
            .bits = bits,
            .group_size = 32,
            .levels = UniformLevels::symmetric,
            .rule = ScaleRule::norm,
            .scale_type = type,
        };
        const std::vector<float> row = test::gaussian(32, seed, 3.0);
        const double ratio = std::sqrt(squared_length(decoded_row(coder, 1.0, row)) / squared_length(row));
        const double rounding = type == ScaleType::fp16 ? 0x1p-11 : type == ScaleType::bf16 ? 0x1p-8 : 0x1p-22;
        INFO(test::describe(coder) << ", seed " << seed);
        CHECK(std::abs(ratio - 1.0) <= rounding + 0x1p-20);
      }
}

TEST_CASE("Least squares has the smaller error and the shorter row", "[codec]") {
  for (int bits = 1; bits <= 8; ++bits)
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const std::vector<float> row = test::gaussian(24, seed + 100);
      UniformCoder coder{
          .bits = bits,
          .group_size = 24,
          .levels = UniformLevels::symmetric,
          .rule = ScaleRule::norm,
          .scale_type = ScaleType::fp32,
      };
      const std::vector<float> norm = decoded_row(coder, 1.0, row);
      coder.rule = ScaleRule::least_squares;
      const std::vector<float> fitted = decoded_row(coder, 1.0, row);
      INFO("bits " << bits << ", seed " << seed);
      CHECK(test::relative_difference(fitted, row) <= test::relative_difference(norm, row) + 1e-6);
      CHECK(squared_length(fitted) <= squared_length(norm) * (1 + 1e-6));
      CHECK(squared_length(fitted) < squared_length(row));
    }
}

TEST_CASE("The Gaussian step is the best one for these levels", "[codec]") {
  // The mean squared error of mid-rise levels of step d on a unit Gaussian, by a fine sum; d is what a group of unit
  // root mean square gets as its first step, seen through absmax-free codes of the norm rule.
  for (int bits = 1; bits <= 8; ++bits) {
    const double half = std::pow(2.0, bits - 1);
    const auto error = [&](double d) {
      double sum = 0.0;
      for (double x = 0.0005; x < 8.0; x += 0.001) {
        const double level = std::clamp(std::floor(x / d), -half, half - 1) + 0.5;
        sum += std::pow(x - d * level, 2) * std::exp(-x * x / 2);
      }
      return sum;
    };
    // The codec's step: the smallest x with the second code, in a group of root mean square 1.
    const UniformCoder coder{
        .bits = bits,
        .group_size = 2,
        .levels = UniformLevels::symmetric,
        .rule = ScaleRule::norm,
        .scale_type = ScaleType::fp32,
    };
    if (bits == 1) continue;  // the only edge of one bit is at zero
    double low = 0.0, high = 1.4;
    for (int i = 0; i < 40; ++i) {
      const double x = (low + high) / 2, other = std::sqrt(2.0 - x * x);
      std::vector<std::uint8_t> codes(2);
      std::vector<float> numbers(1);
      encode_row(coder, 1.0, std::vector<float>{static_cast<float>(x), static_cast<float>(other)}, codes, numbers);
      (codes[0] > static_cast<std::uint8_t>(half) ? high : low) = x;
    }
    INFO("bits " << bits << ", step " << low);
    CHECK(error(low) <= error(low * 1.01) * (1 + 1e-6));
    CHECK(error(low) <= error(low * 0.99) * (1 + 1e-6));
  }
}

TEST_CASE("Exact rows are rounded to bfloat16", "[codec]") {
  std::vector<float> row = test::gaussian(101, 3);
  std::vector<float> expected;
  for (const float x : row) expected.push_back(static_cast<float>(test::nearest_bf16(static_cast<double>(x))));
  quantize_row(ExactCoder{}, 1.0, row);
  CHECK(test::first_bit_difference(row, expected) == "");
}
