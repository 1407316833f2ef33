#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <string>

/// The part of a layer that one tensor-parallel rank holds. Artifacts are global: they do not depend on the number of
/// ranks.
namespace kvq {

/// Consecutive heads of a layer.
struct HeadSlice {
  int first_q = 0, num_q = 0;
  int first_kv = 0, num_kv = 0;
};

/// Why a layer cannot be divided among `size` ranks, with its heads and the sizes that are possible; empty if it can.
std::string slice_fault(const LayerGeometry& geometry, int size);

/// The heads of rank `rank` of `size`. KV heads are divided among ranks, or replicated if there are fewer of them than
/// ranks, so that each rank has the KV heads of its query heads. @param geometry  one without slice_fault()
HeadSlice slice_of(const LayerGeometry& geometry, int rank, int size);

/// Why the centroids of a layer cannot be divided among `size` ranks: a rank sees the rows of its own heads only.
std::string joint_fault(const LayerPlan& plan, int size);

/// The plan of these heads alone, which quantizes their rows as the whole plan does. Leaves out fields that only
/// explain a rotation. Its rows may be shorter than those of the whole plan: pages have the whole plan's.
/// @param plan  valid, without joint_fault()
LayerPlan slice(const LayerPlan& plan, const HeadSlice& heads);

/// Golden rows of these heads. @param plan  the whole plan
GoldenRows slice(const GoldenRows& rows, const LayerPlan& plan, const HeadSlice& heads);

}  // namespace kvq
