#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <string>

/// What one rank of tensor parallelism holds of a layer. Artifacts are global: nobody calibrates for a number of ranks.
namespace kvq {

/// Consecutive heads of a layer.
struct HeadSlice {
  int first_q = 0, num_q = 0;
  int first_kv = 0, num_kv = 0;
};

/// Why a layer cannot be cut in `size` equal parts, naming its heads and what would go; empty if it can.
std::string slice_fault(const LayerGeometry& geometry, int size);

/// The heads of rank `rank` of `size`: KV heads are divided, or if there are fewer of them than ranks replicated, so
/// that each rank has the KV heads of its query heads. @param geometry  without slice_fault()
HeadSlice slice_of(const LayerGeometry& geometry, int rank, int size);

/// The plan of these heads alone: it codes their rows as the whole one does. Leaves out what only explains a rotation.
/// @param plan  valid, without mixed widths, centroids and codebooks (pages hold none)
LayerPlan slice(const LayerPlan& plan, const HeadSlice& heads);

/// Golden rows of these heads. @param plan  the whole one
GoldenRows slice(const GoldenRows& rows, const LayerPlan& plan, const HeadSlice& heads);

}  // namespace kvq
