#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

namespace kvq {

/// Element types of activations and tensors on disk.
enum class DType { f16, bf16, f32, f64, i8, u8, u16, i64 };

std::size_t size_of(DType type);

/// Activation types and their names in `kvq_dtype` of a dump: "float16", "bfloat16", "float32". activation_dtype() is
/// empty for any other name.
std::optional<DType> activation_dtype(std::string_view name);
std::string_view activation_name(DType type);

/// Exact widening of 16-bit patterns.
inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
float f16_to_float(std::uint16_t bits);

/// Rounds to nearest even; a magnitude beyond the largest finite value becomes that value (formats/packing.md, R). NaN
/// stays NaN.
std::uint16_t float_to_bf16(float value);
std::uint16_t float_to_f16(float value);

/// Widens `count` elements of `type` (f16, bf16 or f32) at `source` into `target`.
void widen(DType type, const std::byte* source, std::size_t count, float* target);

}  // namespace kvq
