#pragma once

#include <kvq/plan/scheme.h>

#include <fmt/core.h>

#include <string>
#include <vector>

namespace kvq::test {

/// Every uniform coder of formats/packing.md with this group size: 5 rules, 8 widths, 3 scale types.
inline std::vector<UniformCoder> all_schemes(int group_size) {
  std::vector<UniformCoder> schemes;
  for (int bits = 1; bits <= 8; ++bits)
    for (const ScaleType type : {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32}) {
      for (const ZeroKind zero : {ZeroKind::floating, ZeroKind::integer})
        schemes.push_back({.bits = bits, .group_size = group_size, .scale_type = type, .zero = zero});
      for (const ScaleRule rule : {ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm})
        schemes.push_back({
            .bits = bits,
            .group_size = group_size,
            .levels = UniformLevels::symmetric,
            .rule = rule,
            .scale_type = type,
        });
    }
  return schemes;
}

inline std::string describe(const UniformCoder& coder) {
  return fmt::format("{} {} {}, {} bits, groups of {}, {}", to_string(coder.levels), to_string(coder.rule),
                     to_string(coder.zero), coder.bits, coder.group_size, to_string(coder.scale_type));
}

}  // namespace kvq::test
