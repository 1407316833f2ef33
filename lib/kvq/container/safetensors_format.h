#pragma once

#include <kvq/core/dtype.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

/// Shared by the reader and the writer of safetensors files; private to both.
namespace kvq::detail {

inline constexpr std::uint64_t kLengthBytes = 8;               ///< the header's length comes first, little-endian
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  ///< limit of the reference implementation
inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::string_view kKnownDtypes = "F16, BF16, F32, F64, I8, U8, U16, I64";

std::string_view safetensors_name(DType type);
std::optional<DType> safetensors_dtype(std::string_view name);

/// Product of the extents times the size of an element; empty if an extent is negative or the product overflows.
std::optional<std::int64_t> tensor_bytes(DType type, std::span<const std::int64_t> shape);

/// The dtype that holds elements of a C++ type.
template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, double>)
    return DType::f64;
  else if constexpr (std::is_same_v<T, std::int8_t>)
    return DType::i8;
  else if constexpr (std::is_same_v<T, std::uint8_t>)
    return DType::u8;
  else if constexpr (std::is_same_v<T, std::uint16_t>)
    return DType::u16;
  else {
    static_assert(std::is_same_v<T, std::int64_t>);
    return DType::i64;
  }
}

}  // namespace kvq::detail
