#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/plan/layer_plan.h>

namespace kvq {

/// The columns of OSCAR Table 10 for keys stored by a plan, on one KV head of a dump: at most 2048 of its tokens,
/// evenly spaced.
struct RotationColumns {
  double largest = 0.0;          ///< max |x_rot| over tokens and channels, x_rot = (k - center or centroid) A
  double group_range = 0.0;      ///< mean over tokens and groups of max - min of x_rot; a group shares one scale
  double importance_peak = 0.0;  ///< max / mean of diag(A^-1 C A^-T), C the second moment of the head's queries
  double error_trace = 0.0;      ///< mean |x_rot - dequantized x_rot|^2, the plan's clip included
};
/// @param plan  a valid plan of the layer's keys, without joint centroids
RotationColumns rotation_columns(const LayerActivations& layer, const TensorPlan& plan, int kv_head);

}  // namespace kvq
