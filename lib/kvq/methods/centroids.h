#pragma once

#include <kvq/methods/rotated_plan.h>

#include <vector>

namespace kvq {

/// Clusters the sampled rows (SAW-INT4 A.2) and puts the centroids into the plan, which has its rotation already.
/// @return  the residuals, as request.data: one per KV head, with metric and weights
/// @throws  Error{usage} if the sample has fewer rows than centroids, naming --sample-tokens
std::vector<FitData> add_centroids(TensorPlan& plan, const RotationRequest& request);

}  // namespace kvq
