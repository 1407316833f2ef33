#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/segment_layout.h>

#include <cstdint>
#include <vector>

namespace kvq {

/// Whether rows of keys have mixed widths and codebook codes that tuned kernels read: head_dim 128, rows of 8 or 12
/// words with up to kMostSegments segments, codebooks of up to kMostLevelBits bits with a level_table().
bool has_segment_rows(const TensorPlan& plan, int dim);

/// What kernels know of such rows.
struct SegmentRows {
  std::vector<SegmentProgram> programs = {};  ///< [num_kv_heads]
  /// [num_kv_heads, kMostUnitChannels] of each channel of a unit: the step of its levels times the segment's gain, by
  /// which the query's channel `sources` is multiplied; 0 behind the last channel.
  std::vector<float> weights = {};
  std::vector<std::uint16_t> sources = {};
};
/// @return  empty if has_segment_rows() is false
SegmentRows segment_rows(const TensorPlan& plan, int num_kv_heads, int dim);

}  // namespace kvq
