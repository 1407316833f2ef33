#pragma once

#include <kvq/plan/scheme.h>

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

/// A second implementation of formats/packing.md, to compare bit by bit. Each binary32 operation is computed in double
/// and rounded once. The result is the same, because a double has more than twice the bits, and does not depend on
/// fused operations.
namespace kvq::test {

/// The number of a binary floating-point format nearest to `value`, ties to even, saturating.
/// @param precision  significant bits; @param min_exponent  of the smallest normal number; @param largest  finite
/// number
double nearest(double value, int precision, int min_exponent, double largest);
double nearest_f16(double value);
double nearest_bf16(double value);
double nearest_in(ScaleType type, double value);

/// The NaN in codes and decoded channels of rows that are not finite.
constexpr auto kPoison = std::bit_cast<float>(0x7fc00000u);
bool all_finite(std::span<const float> row);

struct ReferenceRow {
  std::vector<std::uint8_t> codes;
  std::vector<float> numbers;
  std::vector<float> decoded;
};
ReferenceRow reference_row(const UniformCoder& coder, double clip_ratio, std::span<const float> row);

/// Codes as a bit stream, written bit by bit.
std::vector<std::uint8_t> reference_stream(std::span<const std::uint8_t> codes, int bits);

}  // namespace kvq::test
