#pragma once

#include "common/layers.h"

#include <kvq/artifact/artifact.h>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// Keys or values of all layers: a side of the artifact that charts loop over.
struct ReportSide {
  Side side;
  const char* title;  ///< "Keys", "Values"
  int style;          ///< index of the style of its lines
  /// Null for a layer without values.
  const TensorPlan* plan(const LayerPlan& layer) const { return layer.side(side); }
  int dim(const LayerPlan& layer) const { return layer.geometry.dim(side); }
  bool any(const Artifact& artifact, const std::function<bool(const TensorPlan&)>& has) const;
};
const std::vector<ReportSide>& report_sides();

/// Layer numbers as names of a chart's places.
std::vector<std::string> layer_names(const Artifact& artifact);
/// `of` the plan of this side in each layer; NaN for a layer without a plan.
std::vector<double> layer_values(const Artifact& artifact, const ReportSide& side,
                                 const std::function<double(const TensorPlan&)>& of);

/// Mean bits of an element over keys and values, weighted by channels. The mean over layers is effective_bits of
/// kvq-eval.
double mean_over_channels(const LayerPlan& layer, double keys, double values);

/// Bytes of a token in bfloat16, for all KV heads.
double exact_bytes(const LayerPlan& layer);

}  // namespace kvq
