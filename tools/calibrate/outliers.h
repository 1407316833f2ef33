#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

/// Outlier gains of one layer's heads, from its statistics, whatever their transforms are (formats/artifact.md,
/// "Transforms").
struct LayerOutliers {
  int layer = 0;
  std::vector<double> k, v;  ///< [H], [1] where heads share their rotation; v empty for a layer without values
};
std::vector<LayerOutliers> find_outliers(const StatsSource& source, const Options& options);

/// --report-outliers: one line per layer and side, one column per head.
std::string outlier_table(const std::vector<LayerOutliers>& layers);
Json outlier_json(const std::vector<LayerOutliers>& layers);

/// What a transform would have brought to the head that lacks it most, and what one of values was chosen without: a
/// line each, or nothing.
std::string transform_advice(const StatsSource& source, const Artifact& artifact, const Options& options);

}  // namespace kvq
