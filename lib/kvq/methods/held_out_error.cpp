#include <kvq/methods/held_out_error.h>
#include <kvq/methods/layer_judge.h>
#include <kvq/methods/layers.h>
#include <kvq/plan/baseline.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace kvq {

namespace {

/// The baseline of a side: exact where the side is exact.
TensorPlan baseline_of(const TensorPlan& plan, int num_kv_heads, int dim) {
  TensorPlan baseline;
  if (is_exact(plan.coder)) return baseline;
  baseline.coder = plain_baseline(row_bytes(plan, dim), dim);
  baseline.clip_ratio.assign(static_cast<std::size_t>(num_kv_heads), 1.0);
  return baseline;
}

double squared_error(const LayerJudge& judge, const TensorPlan& plan, Side side) {
  if (is_exact(plan.coder)) return 0.0;
  double error = 0.0;
  for (const OutputChange& change : judge.changes(plan, side)) error += change.squared;
  return error;
}

/// Errors of one layer's plan and of its baseline.
struct LayerError {
  std::int64_t tokens = 0;
  std::vector<std::pair<double, double>> sides;
};

LayerError error_of_layer(const LayerStats& stats, const LayerPlan& plan, Backend& backend) {
  const LayerJudge judge(stats, false, Windows{}, backend);
  LayerError error{.tokens = stats.held_out->count(), .sides = {}};
  for (const Side side : kSides) {
    const TensorPlan* own = plan.side(side);
    if (own == nullptr) continue;
    const TensorPlan baseline = baseline_of(*own, plan.geometry.num_kv_heads, plan.geometry.dim(side));
    error.sides.emplace_back(squared_error(judge, *own, side), squared_error(judge, baseline, side));
  }
  return error;
}

bool has_centroids(const LayerPlan& plan) { return plan.k.centroids || (plan.v && plan.v->centroids); }

}  // namespace

std::optional<HeldOutReport> held_out_report(const StatsSource& source, const std::vector<LayerPlan>& plans,
                                             Backend& backend) {
  if (std::ranges::any_of(plans, has_centroids)) return std::nullopt;
  HeldOutReport report;
  std::atomic<bool> all_held_out = true;
  for_each_layer(
      backend, plans.size(),
      [&](std::size_t i) {
        std::optional<LayerError> error;
        if (!all_held_out) return error;  // there will be no report
        const auto stats = source.load(i);
        if (stats->held_out)
          error = error_of_layer(*stats, plans[i], backend);
        else
          all_held_out = false;
        return error;
      },
      [&](std::size_t, const std::optional<LayerError>& error) {
        if (!error) return;
        report.tokens = error->tokens;
        for (const auto& [own, baseline] : error->sides) {
          report.output_error += own / static_cast<double>(plans.size());
          report.baseline_error += baseline / static_cast<double>(plans.size());
        }
      });
  if (!all_held_out) return std::nullopt;
  return report;
}

Json held_out_to_json(const HeldOutReport& report) {
  return {{"tokens", report.tokens}, {"output_error", report.output_error}, {"baseline_error", report.baseline_error}};
}

}  // namespace kvq
