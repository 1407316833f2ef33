#pragma once

#include <kvq/compute/backend.h>
#include <kvq/compute/cuda/context.h>

#include <span>
#include <vector>

namespace kvq::cuda {

/// Backend::kmeans(). Tasks of equal shape run side by side. Rows that the kernels cannot take are clustered by `host`:
/// of more than kMostClusterDim channels, or of magnitudes near the ends of float's range.
std::vector<KMeansResult> kmeans(Context& context, std::span<const ClusterTask> tasks, Backend& host);

/// Backend::sorted().
std::vector<float> sorted(Context& context, std::vector<float> numbers);

}  // namespace kvq::cuda
