#include "calibrate/outliers.h"

#include "common/table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <kvq/methods/side_view.h>
#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/serving.h>

#include <algorithm>
#include <utility>

namespace kvq {

namespace {

constexpr double kWorthAHint =
    2.0;  ///< outlier gain of an orthogonal head above which transform_advice() prints a hint
constexpr std::size_t kMostColumns = 9;  ///< heads in one line of the table, so that the line fits 80 columns

std::string gain_text(double gain) { return fmt::format("{:.3g}", gain); }

/// The transform to recommend for a side, or null if --transform would be refused.
const char* possible_transform(const Options& options, Side side) {
  const SideOptions& asked = options.side(side);
  if (asked.kmeans > 1) return nullptr;
  const bool keeps_blocks = asked.allocate == Allocate::rope_block;
  return keeps_blocks && !find_method(options.method).balanced_has_one_width ? "diagonal" : "balanced";
}

/// The flag that gives this side its transform: --transform if the other side can take the same, else --transform-k or
/// -v.
std::string flag_for(const Options& options, Side side) {
  const std::string own = possible_transform(options, side);
  const char* const other = possible_transform(options, kvq::other(side));
  return other != nullptr && own == other ? "--transform " + own : fmt::format("--transform-{} {}", name(side), own);
}

/// Whether a transform is possible for this side, but the plan is quantized without one.
bool lacks_transform(const TensorPlan& plan, const Options& options, Side side) {
  return !plan.transform && !options.choose_transform && !is_exact(plan.coder) &&
         possible_transform(options, side) != nullptr;
}

bool has_moments(const LayerStats& stats, Side side) {
  return stats.moments.count(side == Side::k ? Moment::key : Moment::value) > 0 &&
         (side == Side::v || stats.moments.count(Moment::query) > 0);
}

}  // namespace

std::vector<LayerOutliers> find_outliers(const StatsSource& source, const Options& options) {
  std::vector<LayerOutliers> layers;
  for (std::size_t i = 0; i < source.size(); ++i) {
    const auto stats = source.load(i);
    layers.push_back({.layer = stats->layer, .k = outlier_gains(*stats, options, Side::k), .v = {}});
    if (stats->has_values) layers.back().v = outlier_gains(*stats, options, Side::v);
  }
  return layers;
}

std::string outlier_table(const std::vector<LayerOutliers>& layers) {
  std::size_t heads = 0;
  for (const LayerOutliers& layer : layers) heads = std::max(heads, layer.k.size());
  std::string text = "Outlier gain: squared error of rows rotated orthogonally over that of balanced\nones\n";
  for (std::size_t first = 0; first < heads; first += kMostColumns) {
    const std::size_t end = std::min(heads, first + kMostColumns);
    std::vector<std::vector<std::string>> rows = {{"layer", "side"}};
    for (std::size_t h = first; h < end; ++h) rows[0].push_back(fmt::format("head {}", h));
    for (const LayerOutliers& layer : layers)
      for (const Side side : kSides) {
        const std::vector<double>& gains = side == Side::k ? layer.k : layer.v;
        if (gains.empty()) continue;
        rows.push_back({side == Side::k ? std::to_string(layer.layer) : "", name(side)});
        for (std::size_t h = first; h < end; ++h) rows.back().push_back(h < gains.size() ? gain_text(gains[h]) : "");
      }
    text += format_table(rows, "rl" + std::string(end - first, 'r'));
  }
  return text;
}

Json outlier_json(const std::vector<LayerOutliers>& layers) {
  Json all = Json::array();
  for (const LayerOutliers& layer : layers) {
    all.push_back({{"layer", layer.layer}, {"k", layer.k}});
    if (!layer.v.empty()) all.back()["v"] = layer.v;
  }
  return all;
}

std::string layout_warning(const Artifact& artifact) {
  std::vector<int> layers;
  for (const LayerPlan& layer : artifact.layers)
    if (layer.geometry.rope.layout == RopeLayout::none && layer.k.allocation &&
        layer.k.allocation->unit == "rope_block")
      layers.push_back(layer.layer);
  if (layers.empty()) return "";
  return fmt::format(
      "warning: {} without RoPE ({}): the blocks that share a width are neighboring channels there, which no rotation "
      "pairs\n",
      layers.size() == 1 ? "a layer" : "layers", fmt::join(layers, ", "));
}

std::string centroid_advice(const Artifact& artifact) {
  const auto decode_of = [](const LayerPlan& plan) { return served_by(plan, Activation::bf16).by(KernelVerb::decode); };
  for (const LayerPlan& layer : artifact.layers) {
    LayerPlan fewer = layer;
    std::string flags;
    int most = 0;
    for (const Side side : kSides) {
      TensorPlan* plan = side == Side::k ? &fewer.k : fewer.v ? &*fewer.v : nullptr;
      if (plan && plan->centroids && plan->centroids->count > kMostTunedCentroids) {
        most = std::max(most, std::exchange(plan->centroids->count, kMostTunedCentroids));
        flags += fmt::format(" --kmeans-{} {}", name(side), kMostTunedCentroids);
      }
    }
    if (most > 0 && decode_of(layer) == KernelKind::generic && decode_of(fewer) == KernelKind::tuned)
      return fmt::format(
          "hint: layer {}: {} centroids are decoded by generic kernels, much slower than tuned ones, which take up to "
          "{} ({})\n",
          layer.layer, most, kMostTunedCentroids, flags.substr(1));
  }
  return "";
}

std::string transform_advice(const StatsSource& source, const Artifact& artifact, const Options& options) {
  struct Head {
    int layer = 0;
    Side side = Side::k;
    std::size_t head = 0;
    double gain = 0.0;
  } worst;
  bool lacks_metric = false;
  for (std::size_t i = 0; i < source.size(); ++i) {
    const LayerPlan& layer = artifact.layers[i];
    const bool asks_k = lacks_transform(layer.k, options, Side::k),
               asks_v = layer.v && lacks_transform(*layer.v, options, Side::v),
               transforms_v = layer.v && layer.v->transform;
    if (!asks_k && !asks_v && !transforms_v) continue;
    const auto stats = source.load(i);
    lacks_metric = lacks_metric || (transforms_v && stats->o_proj_metric.empty());
    for (const Side side : kSides) {
      if (!(side == Side::k ? asks_k : asks_v) || !has_moments(*stats, side)) continue;
      const std::vector<double> gains = outlier_gains(*stats, options, side);
      for (std::size_t h = 0; h < gains.size(); ++h)
        if (gains[h] > worst.gain) worst = {layer.layer, side, h, gains[h]};
    }
  }
  std::string text;
  if (worst.gain > kWorthAHint)
    text +=
        fmt::format("hint: layer {} {}, head {}: outlier gain {} that an orthogonal rotation leaves; try {}\n",
                    worst.layer, plural(worst.side), worst.head, gain_text(worst.gain), flag_for(options, worst.side));
  if (lacks_metric)
    text +=
        "hint: no o_proj metric in the statistics, the identity stood in for it in transforms of values; dump again "
        "with dump_qkv.py\n";
  return text;
}

}  // namespace kvq
