#pragma once

#include <kvq/compute/backend.h>

#include <span>

namespace kvq {

struct ClipChoice {
  double ratio = 1.0;
  double cost = 0.0;
};
/// The clip ratio of smallest clip_cost() on the grid 0.85, 0.86, ..., 1.00 over several heads that share it; ties go
/// to the larger ratio.
ClipChoice search_clip(std::span<const RotatedData> heads, const UniformCoder& coder, Backend& backend);

}  // namespace kvq
