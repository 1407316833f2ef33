#include <kvq/eval/float_formats.h>
#include <kvq/eval/float_schemes.h>
#include <kvq/eval/scheme.h>

#include "support/compare.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

using namespace kvq;

namespace {

using Rows = std::vector<float>;

/// A number of a small format as the standard reads its bits, without its sign.
double value_of_code(unsigned code, int mantissa_bits, int bias) {
  const unsigned mantissa = code & ((1u << mantissa_bits) - 1u), exponent = code >> mantissa_bits;
  const double fraction = mantissa / std::exp2(mantissa_bits);
  return exponent == 0 ? std::exp2(1 - bias) * fraction
                       : std::exp2(static_cast<int>(exponent) - bias) * (1.0 + fraction);
}

/// All numbers that are not negative, by their codes. e4m3 ends before its NaN, e2m1 has none.
std::vector<double> table_of(const SmallFloat& format) {
  const bool e4m3 = format.mantissa_bits == 3;
  std::vector<double> table;
  for (unsigned code = 0; code < (e4m3 ? 127u : 8u); ++code)
    table.push_back(e4m3 ? value_of_code(code, 3, 7) : value_of_code(code, 1, 1));
  return table;
}

/// The nearest entry; of two the one with an even code. Beyond the last entry it is the last one, where a double has no
/// digits for the distances from a number of 2^54.
float nearest(const std::vector<double>& table, float x) {
  std::size_t best = 0;
  const double size = std::min(std::abs(double{x}), table.back());
  for (std::size_t code = 1; code < table.size(); ++code) {
    const double own = std::abs(table[code] - size), least = std::abs(table[best] - size);
    if (own < least || (own == least && code % 2 == 0)) best = code;
  }
  return static_cast<float>(std::copysign(table[best], double{x}));
}

float from_bits(std::uint32_t bits) {
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

std::uint32_t bits_of(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

void check_rounding(const SmallFloat& format) {
  const std::vector<double> table = table_of(format);
  int differences = 0;
  const auto check = [&](float x) {
    if (!std::isfinite(x)) return;
    const float found = round_to(format, x), expected = nearest(table, x);
    if (bits_of(found) != bits_of(expected) && ++differences < 5)
      FAIL_CHECK(fmt::format("{}: found {}, expected {}", x, found, expected));
  };
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 65521)
    check(from_bits(static_cast<std::uint32_t>(bits)));
  for (std::size_t code = 0; code + 1 < table.size(); ++code) {
    const auto number = static_cast<float>(table[code]);
    const auto halfway = static_cast<float>((table[code] + table[code + 1]) / 2.0);
    for (const float at : {number, halfway})
      for (const float x : {at, std::nextafter(at, 0.0f), std::nextafter(at, 1e9f)}) check(x), check(-x);
  }
  CHECK(differences == 0);
}

/// One head's rows as a tensor of `heads` heads in binary32.
ActivationTensor tensor_of(const std::vector<Rows>& heads, int dim) {
  ActivationTensor tensor{.tokens = static_cast<std::int64_t>(heads[0].size()) / dim,
                          .heads = static_cast<int>(heads.size()),
                          .dim = dim,
                          .raw = {}};
  const auto d = static_cast<std::size_t>(dim);
  for (std::size_t t = 0; t < static_cast<std::size_t>(tensor.tokens); ++t)
    for (const Rows& rows : heads) {
      const auto bytes = std::as_bytes(std::span(rows).subspan(t * d, d));
      tensor.raw.insert(tensor.raw.end(), bytes.begin(), bytes.end());
    }
  return tensor;
}

Rows stored(const StoredSide& side, const std::vector<Rows>& heads, int dim, int head) {
  Rows rows = heads[static_cast<std::size_t>(head)];
  side.restore(tensor_of(heads, dim), 0, head, rows);
  return rows;
}

}  // namespace

TEST_CASE("Small floats round to the nearest number of their table, halves to even, large ones to the largest",
          "[eval][scheme]") {
  check_rounding(kE4m3);
  check_rounding(kE2m1);
}

TEST_CASE("Small floats, written by hand", "[eval][scheme]") {
  struct Vector {
    float x, expected;
  };
  for (const auto& [x, expected] :
       {Vector{0.0f, 0.0f}, Vector{448.0f, 448.0f}, Vector{464.0f, 448.0f}, Vector{1e30f, 448.0f},
        Vector{-500.0f, -448.0f}, Vector{17.0f, 16.0f}, Vector{19.0f, 20.0f}, Vector{17.5f, 18.0f},
        Vector{1.0625f, 1.0f}, Vector{1.1875f, 1.25f}, Vector{0.001953125f, 0.001953125f}, Vector{0.0009765625f, 0.0f},
        Vector{0.0029296875f, 0.00390625f}, Vector{0.015625f, 0.015625f}, Vector{-0.3f, -0.3125f}}) {
    CAPTURE(x);
    CHECK(round_to(kE4m3, x) == expected);
  }
  for (const auto& [x, expected] :
       {Vector{0.25f, 0.0f}, Vector{0.26f, 0.5f}, Vector{0.75f, 1.0f}, Vector{1.25f, 1.0f}, Vector{1.75f, 2.0f},
        Vector{2.5f, 2.0f}, Vector{2.51f, 3.0f}, Vector{3.5f, 4.0f}, Vector{5.0f, 4.0f}, Vector{5.01f, 6.0f},
        Vector{7.0f, 6.0f}, Vector{-2.5f, -2.0f}, Vector{-1e9f, -6.0f}}) {
    CAPTURE(x);
    CHECK(round_to(kE2m1, x) == expected);
  }
  CHECK(std::signbit(round_to(kE4m3, -0.0f)));
  CHECK(std::signbit(round_to(kE2m1, -0.1f)));
}

TEST_CASE("fp8 has the scale of all heads, of one head, or none", "[eval][scheme]") {
  const std::vector<double> table = table_of(kE4m3);
  const std::vector<Rows> heads = {test::gaussian(40 * 24, 1), test::gaussian(40 * 24, 2, 30.0)};
  const auto largest = [&](std::size_t head) {
    float most = 0.0f;
    for (const float x : heads[head]) most = std::max(most, std::abs(x));
    return most;
  };
  const float all = std::max(largest(0), largest(1));
  for (const auto& [name, scales] :
       std::vector<std::pair<std::string, std::vector<float>>>{{"fp8", {all / 448.0f, all / 448.0f}},
                                                               {"fp8-head", {largest(0) / 448.0f, largest(1) / 448.0f}},
                                                               {"fp8-unscaled", {1.0f, 1.0f}}})
    for (const int head : {0, 1}) {
      CAPTURE(name, head);
      const auto h = static_cast<std::size_t>(head);
      Rows expected;
      for (const float x : heads[h]) expected.push_back(nearest(table, x / scales[h]) * scales[h]);
      const StoredLayer layer = find_scheme(name).of_layer(
          {.num_q_heads = 2, .num_kv_heads = 2, .head_dim = 24, .v_head_dim = 24, .softmax_scale = 1.0}, 0, 1);
      CHECK(test::first_bit_difference(stored(*layer.k, heads, 24, head), expected) == "");
      CHECK(test::first_bit_difference(stored(*layer.v, heads, 24, head), expected) == "");
    }
}

TEST_CASE("fp8 of zeros and of the smallest numbers is finite", "[eval][scheme]") {
  for (const float x : {0.0f, 1e-45f, 1e-40f}) {
    const std::vector<Rows> heads = {Rows(16, x)};
    CAPTURE(x);
    for (const float found : stored(*fp8_side(Fp8Scale::tensor), heads, 16, 0)) CHECK(found <= 2.0f * x);
    for (const float found : stored(*nvfp4_side(16), heads, 16, 0)) CHECK(found <= 2.0f * x);
  }
}

TEST_CASE("nvfp4 by hand", "[eval][scheme]") {
  // The largest number is 2688 = 448 * 6, so the scale of the tensor is 1. The first block's scale is 448 and its step
  // 448; the second block's largest number is 12, its scale 2; the third block, shorter, has 0.9: 0.15 becomes 0.15625
  // (10 / 64), and the codes of 0.9 / 0.15625 = 5.76 and 0.2 / 0.15625 = 1.28 are 6 and 1.5.
  Rows row(36, 0.0f);
  row[0] = -2688.0f, row[1] = 448.0f, row[2] = 560.0f, row[3] = 100.0f;
  row[16] = 12.0f, row[17] = 5.0f, row[18] = -7.0f, row[19] = 0.4f;
  row[32] = 0.9f, row[33] = -0.2f;
  const Rows found = stored(*nvfp4_side(36), {row}, 36, 0);
  Rows expected(36, 0.0f);
  expected[0] = -2688.0f, expected[1] = 448.0f, expected[2] = 448.0f, expected[3] = 0.0f;
  expected[16] = 12.0f, expected[17] = 4.0f, expected[18] = -8.0f, expected[19] = 0.0f;
  expected[32] = 0.9375f, expected[33] = -0.234375f;
  for (std::size_t i = 0; i < row.size(); ++i) {
    CAPTURE(i);
    CHECK(found[i] == expected[i]);
  }
}

TEST_CASE("nvfp4 by its tables", "[eval][scheme]") {
  const std::vector<double> e4m3 = table_of(kE4m3), e2m1 = table_of(kE2m1);
  for (const int dim : {16, 24, 80, 128}) {
    CAPTURE(dim);
    const std::vector<Rows> heads = {test::rows_with_outliers(33, dim, 3),
                                     test::gaussian(static_cast<std::size_t>(33 * dim), 4)};
    float all = 0.0f;
    for (const Rows& rows : heads)
      for (const float x : rows) all = std::max(all, std::abs(x));
    const float scale = all / 2688.0f;
    for (const int head : {0, 1}) {
      const Rows& rows = heads[static_cast<std::size_t>(head)];
      Rows expected;
      for (std::size_t row = 0; row < rows.size(); row += static_cast<std::size_t>(dim))
        for (int first = 0; first < dim; first += 16) {
          const auto block = std::span(rows).subspan(row + static_cast<std::size_t>(first),
                                                     static_cast<std::size_t>(std::min(16, dim - first)));
          float largest = 0.0f;
          for (const float x : block) largest = std::max(largest, std::abs(x));
          const float step = nearest(e4m3, largest / 6.0f / scale) * scale;
          for (const float x : block) expected.push_back(step > 0.0f ? nearest(e2m1, x / step) * step : 0.0f);
        }
      CHECK(test::first_bit_difference(stored(*nvfp4_side(dim), heads, dim, head), expected) == "");
    }
  }
}
