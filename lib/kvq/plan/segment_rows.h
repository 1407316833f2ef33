#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/segment_layout.h>

#include <cstdint>
#include <vector>

namespace kvq {

/// Whether rows of keys have mixed widths and codebook codes that tuned kernels read: head_dim 128, rows of 8 or 12
/// words with up to kMostSegments segments and derived_words() derived words, codebooks that are symmetric about 0 of
/// up to 4 bits, or of levels at equal distances.
bool has_segment_rows(const TensorPlan& plan, int dim);

/// What kernels know of such rows.
struct SegmentRows {
  std::vector<SegmentProgram> programs = {};  ///< [num_kv_heads]
  /// [num_kv_heads, 32 segment_words()] of each bit of a product: what it adds to the channel `sources`; 0 for bits of
  /// no channel. Gains are in it.
  std::vector<float> weights = {};
  std::vector<std::uint16_t> sources = {};
};
/// @return  empty if has_segment_rows() is false
SegmentRows segment_rows(const TensorPlan& plan, int num_kv_heads, int dim);

}  // namespace kvq
