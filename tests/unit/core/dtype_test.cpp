#include <kvq/core/dtype.h>

#include "support/packing_reference.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

using namespace kvq;

namespace {

/// The number of a 16-bit pattern, by the definition of the format.
double value_of(unsigned pattern, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1, special = (1 << exponent_bits) - 1;
  const int exponent = static_cast<int>((pattern >> fraction_bits) & static_cast<unsigned>(special));
  const double fraction =
      static_cast<double>(pattern & ((1u << fraction_bits) - 1u)) / static_cast<double>(1u << fraction_bits);
  const double sign = pattern >> 15 ? -1.0 : 1.0;
  if (exponent == special) return fraction == 0.0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias) : sign * std::ldexp(1.0 + fraction, exponent - bias);
}

struct Format {
  const char* name;
  int exponent_bits;
  float (*widen)(std::uint16_t);
  std::uint16_t (*narrow)(float);
  double (*nearest)(double);
  double largest;
};
const Format kFormats[] = {{"float16", 5, f16_to_float, float_to_f16, test::nearest_f16, 65504.0},
                           {"bfloat16", 8, bf16_to_float, float_to_bf16, test::nearest_bf16, 255.0 * 0x1p120}};

/// Numbers at which narrowing is likely to go wrong: neighbors, ties, and the floats beside ties.
std::vector<float> edges(const Format& format) {
  std::vector<float> numbers = {0.0f, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(),
                                std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()};
  for (unsigned pattern = 0; pattern < 0x7fffu; ++pattern) {
    const double here = value_of(pattern, format.exponent_bits), next = value_of(pattern + 1, format.exponent_bits);
    if (!std::isfinite(here)) break;
    const auto middle = static_cast<float>(std::isfinite(next) ? (here + next) / 2.0 : here * (1.0 + 0x1p-12));
    for (const float number :
         {static_cast<float>(here), middle, std::nextafter(middle, 0.0f), std::nextafter(middle, HUGE_VALF)})
      numbers.push_back(number);
  }
  return numbers;
}

}  // namespace

TEST_CASE("All 65536 patterns widen to the number that they stand for", "[core]") {
  for (const Format& format : kFormats) {
    for (unsigned pattern = 0; pattern < 0x10000u; ++pattern) {
      const double expected = value_of(pattern, format.exponent_bits);
      const float found = format.widen(static_cast<std::uint16_t>(pattern));
      const bool same = std::isnan(expected)
                            ? std::isnan(found)
                            : static_cast<double>(found) == expected && std::signbit(found) == std::signbit(expected);
      if (!same) FAIL(format.name << " " << std::hex << pattern << ": " << found << ", expected " << expected);
    }
  }
}

TEST_CASE("Every finite pattern narrows back to itself", "[core]") {
  for (const Format& format : kFormats)
    for (unsigned pattern = 0; pattern < 0x10000u; ++pattern) {
      if (!std::isfinite(value_of(pattern, format.exponent_bits))) continue;
      const std::uint16_t found = format.narrow(format.widen(static_cast<std::uint16_t>(pattern)));
      if (found != pattern) FAIL(format.name << " " << std::hex << pattern << " became " << found);
    }
}

TEST_CASE("Narrowing goes to the nearest number, ties to even, and saturates", "[core]") {
  for (const Format& format : kFormats) {
    std::vector<float> numbers = edges(format);
    test::Random random(11);
    for (int i = 0; i < 200000; ++i) numbers.push_back(test::any_finite(random));
    for (const float number : numbers)
      for (const float signed_number : {number, -number}) {
        const float found = format.widen(format.narrow(signed_number));
        const double expected = format.nearest(static_cast<double>(signed_number));
        if (static_cast<double>(found) != expected || std::signbit(found) != std::signbit(signed_number))
          FAIL(format.name << ": " << std::hexfloat << signed_number << " became " << found << ", expected "
                           << expected);
      }
  }
}

TEST_CASE("What is beyond the largest finite number becomes that number, with its sign", "[core]") {
  for (const Format& format : kFormats) {
    INFO(format.name);
    for (const float number : {std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()}) {
      CHECK(static_cast<double>(format.widen(format.narrow(number))) == format.largest);
      CHECK(static_cast<double>(format.widen(format.narrow(-number))) == -format.largest);
    }
  }
  CHECK(float_to_f16(65520.0f) == 0x7bff);  // IEEE 754 rounds this tie to infinity; the library saturates
}

TEST_CASE("NaN stays NaN when narrowed, whatever its payload", "[core]") {
  for (const Format& format : kFormats)
    for (const std::uint32_t pattern : {0x7fc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffbfffffu})
      CHECK(std::isnan(format.widen(format.narrow(std::bit_cast<float>(pattern)))));
}

TEST_CASE("Elements of the three activation types widen from unaligned bytes", "[core]") {
  const std::vector<float> numbers = {1.5f, -0.0f, 65504.0f, -2.0f, 0x1p-14f};
  std::vector<std::byte> bytes(1 + 4 * numbers.size());
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const std::uint16_t half = type == DType::f16 ? float_to_f16(numbers[i]) : float_to_bf16(numbers[i]);
      const void* source = type == DType::f32 ? static_cast<const void*>(&numbers[i]) : &half;
      std::memcpy(bytes.data() + 1 + i * size_of(type), source, size_of(type));
    }
    std::vector<float> found(numbers.size());
    widen(type, bytes.data() + 1, numbers.size(), found.data());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const float expected = type == DType::bf16 ? bf16_to_float(float_to_bf16(numbers[i])) : numbers[i];
      CHECK(std::bit_cast<std::uint32_t>(found[i]) == std::bit_cast<std::uint32_t>(expected));
    }
  }
}

TEST_CASE("The words of kvq_dtype name the three activation types and no other", "[core]") {
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) CHECK(activation_dtype(activation_name(type)) == type);
  CHECK(activation_name(DType::bf16) == "bfloat16");
  for (const char* word : {"", "float64", "Float16", "bf16", "float16 "}) CHECK(activation_dtype(word) == std::nullopt);
  CHECK(size_of(DType::f16) == 2);
  CHECK(size_of(DType::bf16) == 2);
  CHECK(size_of(DType::f32) == 4);
  CHECK(size_of(DType::f64) == 8);
  CHECK(size_of(DType::i8) == 1);
  CHECK(size_of(DType::u8) == 1);
  CHECK(size_of(DType::u16) == 2);
  CHECK(size_of(DType::i64) == 8);
}
