#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// Some side of some layer has a transform.
bool has_transforms(const Artifact& artifact);

/// "balanced 1.2-34": kind and outlier gains of the heads; a dash without a transform.
/// @param largest_only  "balanced 34"
std::string transform_text(const TensorPlan& plan, bool largest_only = false);

/// Three digits at most: "1.2", "34", "1e+04".
std::string gain_text(double gain);
double largest_gain(const MetricTransform& transform);

/// What an outlier gain is, in lines of a page.
extern const char* const kOutlierGainMeans;

}  // namespace kvq
