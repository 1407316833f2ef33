#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/segment_rows.h>
#include <kvq/runtime/kernels/common/row_code.h>

#include <vector>

/// Constant data of generic kernels (RowCode), made from a plan on the host; the caller copies the arrays to the
/// device.
namespace kvq {

/// The rows of one side in bit tiles.
struct RowCodeData {
  std::vector<HeadRows> heads = {};  ///< [num_kv_heads], or empty for code tiles and exact rows
  std::vector<float> tables = {};    ///< of all heads; equal tables once
  std::vector<float> weights = {};   ///< RowCode::weights
  std::vector<LevelTable> levels = {};
  SegmentRows segments = {};          ///< RowCode::programs and program_taps
  std::vector<float> centroids = {};  ///< [H, C, D], or empty
  std::vector<float> rotated_centroids = {};
  RowCode values = {};  ///< the parameters that are no arrays
};

/// @param plan  valid, of the heads [0, num_kv_heads); keys without folded maps or scales if there are centroids
RowCodeData row_code_data(const TensorPlan& plan, int num_kv_heads, int dim);

}  // namespace kvq
