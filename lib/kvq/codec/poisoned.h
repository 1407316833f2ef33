#pragma once

#include <cstdint>
#include <span>

/// Rows that are not finite (packing.md): the codec marks them as poisoned, tools refuse them.
namespace kvq {

/// Whether no channel of a row is NaN or infinite.
bool is_finite(std::span<const float> row);

/// For tools, whose rows are finite if their input is sound. Call it before a row is quantized.
/// @throws Error{numerical} that names the first channel that is not finite
void expect_finite(std::span<const float> row);

/// Fills in codes and numbers of a poisoned row.
void poison(std::span<std::uint8_t> codes, std::span<float> numbers);

/// Whether a row's numbers are those of a poisoned row. False for rows without numbers.
bool is_poisoned(std::span<const float> numbers);

/// A channel of an exact row: the bits of R(x) as bfloat16, of NaN if x is not finite.
std::uint16_t exact_bits(float x);

}  // namespace kvq
