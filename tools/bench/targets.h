#pragma once

#include "bench/rows.h"

#include <optional>
#include <string>
#include <vector>

namespace kvq::bench {

/// A performance target of the runtime on one H200.
struct Target {
  std::string what;     ///< "INT2 decode 32 x 32k"
  std::string measure;  ///< "of read floor", "over bf16" (the faster bf16 baseline of the run), "us", ...
  double asked = 0.0;
  bool at_most = false;           ///< at most `asked` instead of at least
  std::optional<double> reached;  ///< none if not measured
  bool met() const { return reached && (at_most ? *reached <= asked : *reached >= asked); }
};

/// The cases of all targets: 32 query heads, 8 KV heads, head_dim 128, pages of 64 tokens, exact windows of 64 sink and
/// 256 recent tokens, dense rotations. @throws Error{unsupported} if a variant is not built
Run target_cases();
/// @param run  target_cases(), with or without results
std::vector<Target> judge(const Run& run);

}  // namespace kvq::bench
