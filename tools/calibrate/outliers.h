#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

/// Outlier gains of one layer's heads, computed from statistics. The transforms of the plans do not matter
/// (formats/artifact.md, "Transforms").
struct LayerOutliers {
  int layer = 0;
  std::vector<double> k, v;  ///< [H], or [1] where heads share their rotation; v is empty for a layer without values
};
std::vector<LayerOutliers> find_outliers(const StatsSource& source, const Options& options);

/// Table of --report-outliers: one line for each layer and side, one column for each head.
std::string outlier_table(const std::vector<LayerOutliers>& layers);
Json outlier_json(const std::vector<LayerOutliers>& layers);

/// A line that names the layers without RoPE whose keys have widths for each RoPE block; empty if there are none.
std::string layout_warning(const Artifact& artifact);

/// A line that names the side with more centroids than tuned kernels decode, if fewer would have such a kernel.
std::string centroid_advice(const Artifact& artifact);

/// At most two lines of hints: the head with the largest outlier gain that lacks a transform, and transforms of values
/// that used the identity because the statistics have no o_proj metric.
std::string transform_advice(const StatsSource& source, const Artifact& artifact, const Options& options);

}  // namespace kvq
