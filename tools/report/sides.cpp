#include "report/sides.h"

#include "report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

bool ReportSide::any(const Artifact& artifact, const std::function<bool(const TensorPlan&)>& has) const {
  return std::any_of(artifact.layers.begin(), artifact.layers.end(),
                     [&](const LayerPlan& layer) { return plan(layer) != nullptr && has(*plan(layer)); });
}

const std::vector<ReportSide>& report_sides() {
  static const std::vector<ReportSide> sides = {{Side::k, "Keys", kKeysStyle}, {Side::v, "Values", kValuesStyle}};
  return sides;
}

std::vector<std::string> layer_names(const Artifact& artifact) {
  std::vector<std::string> names;
  names.reserve(artifact.layers.size());
  for (const LayerPlan& layer : artifact.layers) names.push_back(std::to_string(layer.layer));
  return names;
}

std::vector<double> layer_values(const Artifact& artifact, const ReportSide& side,
                                 const std::function<double(const TensorPlan&)>& of) {
  std::vector<double> values;
  values.reserve(artifact.layers.size());
  for (const LayerPlan& layer : artifact.layers)
    values.push_back(side.plan(layer) == nullptr ? NAN : of(*side.plan(layer)));
  return values;
}

double mean_over_channels(const LayerPlan& layer, double keys, double values) {
  const double k_dim = layer.geometry.head_dim, v_dim = layer.v ? layer.geometry.v_head_dim : 0.0;
  return v_dim > 0.0 ? (k_dim * keys + v_dim * values) / (k_dim + v_dim) : keys;
}

double exact_bytes(const LayerPlan& layer) {
  const LayerGeometry& g = layer.geometry;
  return 2.0 * g.num_kv_heads * (g.head_dim + (layer.v ? g.v_head_dim : 0));
}

}  // namespace kvq
