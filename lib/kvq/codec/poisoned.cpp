#include <kvq/codec/poisoned.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvq {

namespace {

/// The quiet NaN that narrows to those of fp16 and bf16.
constexpr auto kNaN = std::bit_cast<float>(0x7fc00000u);
constexpr std::uint16_t kBf16NaN = 0x7fc0;

}  // namespace

bool is_finite(std::span<const float> row) {
  std::uint32_t largest = 0;  // without an early end the loop vectorizes
  for (const float x : row) largest = std::max(largest, std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
  return largest < 0x7f800000u;
}

void expect_finite(std::span<const float> row) {
  if (is_finite(row)) return;
  const auto bad = std::find_if(row.begin(), row.end(), [](float x) { return !std::isfinite(x); });
  throw Error{ErrorKind::numerical,
              fmt::format("row to encode: channel {} is {}, expected a finite number", bad - row.begin(), *bad)};
}

void poison(std::span<std::uint8_t> codes, std::span<float> numbers) {
  std::fill(codes.begin(), codes.end(), std::uint8_t{0});
  std::fill(numbers.begin(), numbers.end(), kNaN);
}

bool is_poisoned(std::span<const float> numbers) { return !numbers.empty() && std::isnan(numbers[0]); }

std::uint16_t exact_bits(float x) { return std::isfinite(x) ? float_to_bf16(x) : kBf16NaN; }

}  // namespace kvq
