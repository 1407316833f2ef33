#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

namespace kvq {

enum class UniformLevels { affine, symmetric };
enum class ScaleRule { minmax, absmax, least_squares, norm };
enum class ScaleType { fp16, bf16, fp32 };
enum class ZeroKind { floating, integer };  ///< what affine groups store beside the scale: minimum or zero point

/// Sixteen-bit rows: bfloat16 of x_rot.
struct ExactCoder {
  bool operator==(const ExactCoder&) const = default;
};

/// Uniform codes of 1 to 8 bits, formats/packing.md. Affine goes with minmax, symmetric with the other rules.
struct UniformCoder {
  int bits = 2;
  int group_size = 128;  ///< channels that share a scale; divides head_dim
  UniformLevels levels = UniformLevels::affine;
  ScaleRule rule = ScaleRule::minmax;
  ScaleType scale_type = ScaleType::fp16;
  ZeroKind zero = ZeroKind::floating;  ///< affine only
  bool operator==(const UniformCoder&) const = default;
  int numbers_per_group() const { return levels == UniformLevels::affine ? 2 : 1; }
};

/// What a code means. A new way of coding is one more alternative, and the compiler lists who must learn it.
using Coder = std::variant<ExactCoder, UniformCoder>;

int scale_bytes(ScaleType type);
const char* to_string(UniformLevels levels);
const char* to_string(ScaleRule rule);
const char* to_string(ScaleType type);
const char* to_string(ZeroKind zero);

/// Bits of one element's code: 16 for exact.
int code_bits(const Coder& coder);
/// Bytes of one row of `dim` channels, codes and numbers (formats/packing.md, "Bytes").
std::int64_t row_bytes(const Coder& coder, int dim);

}  // namespace kvq
