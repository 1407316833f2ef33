#include <kvq/container/safetensors_format.h>

#include <array>
#include <limits>
#include <utility>

namespace kvq::detail {
namespace {

constexpr std::array<std::pair<DType, std::string_view>, 8> kNames{{{DType::f16, "F16"},
                                                                    {DType::bf16, "BF16"},
                                                                    {DType::f32, "F32"},
                                                                    {DType::f64, "F64"},
                                                                    {DType::i8, "I8"},
                                                                    {DType::u8, "U8"},
                                                                    {DType::u16, "U16"},
                                                                    {DType::i64, "I64"}}};

}  // namespace

std::string_view safetensors_name(DType type) {
  for (const auto& [known, name] : kNames)
    if (known == type) return name;
  return "?";
}

std::optional<DType> safetensors_dtype(std::string_view name) {
  for (const auto& [type, known] : kNames)
    if (known == name) return type;
  return std::nullopt;
}

std::optional<std::int64_t> tensor_bytes(DType type, std::span<const std::int64_t> shape) {
  auto bytes = static_cast<std::int64_t>(size_of(type));
  bool is_empty = false;  // the other extents must not overflow even if one extent is 0
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      is_empty = true;
    } else if (bytes > std::numeric_limits<std::int64_t>::max() / extent) {
      return std::nullopt;
    } else {
      bytes *= extent;
    }
  }
  return is_empty ? 0 : bytes;
}

}  // namespace kvq::detail
