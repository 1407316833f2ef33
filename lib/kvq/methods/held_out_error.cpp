#include <kvq/methods/held_out_error.h>
#include <kvq/methods/layer_judge.h>
#include <kvq/plan/baseline.h>

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

bool has_centroids(const LayerPlan& plan) { return plan.k.centroids || (plan.v && plan.v->centroids); }

}  // namespace

std::optional<HeldOutReport> held_out_report(const StatsSource& source, const std::vector<LayerPlan>& plans,
                                             Backend& backend) {
  HeldOutReport report;
  const auto layers = static_cast<double>(plans.size());
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const auto stats = source.load(i);
    const LayerPlan& plan = plans[i];
    if (!stats->held_out || has_centroids(plan)) return std::nullopt;
    const LayerJudge judge(*stats, false, Windows{}, backend);
    report.tokens = stats->held_out->count();
    for (const Side side : kSides) {
      const TensorPlan* own = plan.side(side);
      if (own == nullptr) continue;
      const TensorPlan baseline = baseline_of(*own, plan.geometry.num_kv_heads, plan.geometry.dim(side));
      report.output_error += squared_error(judge, *own, side) / layers;
      report.baseline_error += squared_error(judge, baseline, side) / layers;
    }
  }
  return report;
}

Json held_out_to_json(const HeldOutReport& report) {
  return {{"tokens", report.tokens}, {"output_error", report.output_error}, {"baseline_error", report.baseline_error}};
}

}  // namespace kvq
