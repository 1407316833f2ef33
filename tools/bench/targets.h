#pragma once

#include "bench/rows.h"

#include <optional>
#include <string>
#include <vector>

namespace kvq::bench {

/// What the runtime is asked to reach on one H200.
struct Target {
  std::string what;     ///< "INT2 decode 32 x 32k"
  std::string measure;  ///< "of read floor", "over bf16" (the best of the run), "us", ...
  double asked = 0.0;
  bool at_most = false;           ///< smaller is better
  std::optional<double> reached;  ///< none: not measured
  bool met() const { return reached && (at_most ? *reached <= asked : *reached >= asked); }
};

/// The cases that the targets are about: 32 query heads, 8 KV heads, head_dim 128, pages of 64, 64 sink and 256 recent
/// tokens exact, dense rotations. @throws Error{unsupported} if a variant is not built
Run target_cases();
/// @param run  target_cases(), measured or not
std::vector<Target> judge(const Run& run);

}  // namespace kvq::bench
