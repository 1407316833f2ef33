#include "inspect/transforms.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

const char* const kOutlierGainMeans =
    "outlier gain: squared error of rows rotated orthogonally over that of balanced\n"
    "ones, head by head; 1 = nothing to gain.\n";

bool has_transforms(const Artifact& artifact) {
  return std::any_of(artifact.layers.begin(), artifact.layers.end(),
                     [](const LayerPlan& layer) { return layer.k.transform || (layer.v && layer.v->transform); });
}

std::string gain_text(double gain) {
  if (gain < 9.95) return fmt::format("{:.1f}", gain);
  return gain < 999.5 ? fmt::format("{:.0f}", gain) : fmt::format("{:.0e}", gain);
}

double largest_gain(const MetricTransform& transform) {
  return *std::max_element(transform.outlier_gain.begin(), transform.outlier_gain.end());
}

std::string transform_text(const TensorPlan& plan, bool largest_only) {
  if (!plan.transform) return "-";
  const std::vector<double>& gains = plan.transform->outlier_gain;
  const std::string least = gain_text(*std::min_element(gains.begin(), gains.end())),
                    most = gain_text(largest_gain(*plan.transform));
  return largest_only || least == most ? fmt::format("{} {}", plan.transform->kind, most)
                                       : fmt::format("{} {}-{}", plan.transform->kind, least, most);
}

}  // namespace kvq
