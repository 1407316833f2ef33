#pragma once

#include <kvq/artifact/artifact.h>

#include <functional>
#include <string>
#include <vector>

namespace kvq {

/// Keys or values of all layers, for charts of one side.
struct ReportSide {
  Side side;
  const char* title;  ///< "Keys", "Values"
  int style;          ///< of its lines
  /// Null for a layer without values.
  const TensorPlan* plan(const LayerPlan& layer) const { return layer.side(side); }
  int dim(const LayerPlan& layer) const { return layer.geometry.dim(side); }
  bool any(const Artifact& artifact, const std::function<bool(const TensorPlan&)>& has) const;
};
const std::vector<ReportSide>& report_sides();

/// The layers' numbers, as places of a chart.
std::vector<std::string> layer_names(const Artifact& artifact);
/// `of` each layer's plan of this side; NaN without one.
std::vector<double> layer_values(const Artifact& artifact, const ReportSide& side,
                                 const std::function<double(const TensorPlan&)>& of);

/// Bits of an element of both sides together, each weighted by its channels. The mean over layers is what kvq-eval
/// calls effective_bits.
double mean_over_channels(const LayerPlan& layer, double keys, double values);

/// Bytes of a token in bfloat16, all KV heads.
double exact_bytes(const LayerPlan& layer);

/// "0-3, 7".
std::string range_text(const std::vector<int>& layers);

}  // namespace kvq
