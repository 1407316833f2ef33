#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// Whether any side of any layer has a transform.
bool has_transforms(const Artifact& artifact);

/// Kind, and outlier gains of the heads: "balanced 1.2-34"; a dash if the side has no transform.
/// @param largest_only  only the largest gain: "balanced 34"
std::string transform_text(const TensorPlan& plan, bool largest_only = false);

/// Three digits at most: "1.2", "34", "1e+04".
std::string gain_text(double gain);
double largest_gain(const MetricTransform& transform);

/// Lines of text that explain the outlier gain.
extern const char* const kOutlierGainMeans;

}  // namespace kvq
