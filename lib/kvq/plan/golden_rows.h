#pragma once

#include <cstdint>
#include <vector>

namespace kvq {

/// A few real rows of one layer in bfloat16: consecutive tokens of one sequence, queries and keys after RoPE.
struct GoldenTokens {
  std::int64_t first = 0;             ///< index of the first token in the dump
  std::int64_t count = 0;             ///< N
  std::vector<std::uint16_t> q = {};  ///< [Hq, D] of the last token
  std::vector<std::uint16_t> k = {};  ///< [N, Hkv, D]
  std::vector<std::uint16_t> v = {};  ///< [N, Hkv, Dv], or empty for a layer without values
  bool operator==(const GoldenTokens&) const = default;
};

/// The bytes that one side's plan gives for the golden tokens.
struct GoldenSide {
  std::vector<std::uint8_t> bytes = {};  ///< [N, Hkv, row_bytes], as in packing.md
  std::vector<std::uint8_t> firm =
      {};  ///< [N, Hkv] 1 if rounding in the rotation cannot change the bytes (formats/artifact.md), else 0
  bool operator==(const GoldenSide&) const = default;
};

/// Golden rows of one layer: tokens with their expected bytes and attention output. A runtime on any device can test
/// itself with them.
struct GoldenRows {
  GoldenTokens tokens;
  GoldenSide k, v;              ///< v empty for a layer without values
  std::vector<float> out = {};  ///< [Hq, Dv] attention of the last token's queries over the dequantized rows, or empty
  bool operator==(const GoldenRows&) const = default;
};

inline constexpr std::int64_t kMostGoldenTokens = 4096;

}  // namespace kvq
