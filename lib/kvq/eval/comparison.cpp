#include <kvq/eval/comparison.h>

#include <cmath>
#include <utility>

namespace kvq {

namespace {

/// The same units, such as layers, of two candidates.
struct Pairs {
  std::vector<double> first, own;
  void add(double x, double y) {
    if (std::isnan(x) || std::isnan(y)) return;
    first.push_back(x);
    own.push_back(y);
  }
};

Comparison compare(const CandidateResult& first, const CandidateResult& own, Metric metric, std::uint64_t seed) {
  Comparison comparison{.metric = metric, .change = {}};
  Pairs layers, heads;
  for (std::size_t l = 0; l < own.layers.size(); ++l) {
    const LayerResult &a = first.layers[l], &b = own.layers[l];
    const double x = a.values[metric], y = b.values[metric];
    if (std::isnan(x) || std::isnan(y)) continue;
    layers.add(x, y);
    comparison.wins += is_better(metric, y, x) ? 1 : 0;
    comparison.losses += is_better(metric, x, y) ? 1 : 0;
    for (std::size_t h = 0; h < b.heads.size(); ++h) heads.add(a.heads[h][metric], b.heads[h][metric]);
  }
  comparison.layers = static_cast<int>(layers.own.size());
  // MetricSource::projection has no values of heads.
  const Pairs& units = heads.own.empty() ? layers : heads;
  if (comparison.layers > 0) comparison.change = paired_change(units.first, units.own, seed);
  return comparison;
}

}  // namespace

bool is_better(Metric metric, double own, double first) { return metric->more_is_better ? own > first : own < first; }

std::vector<Comparison> compare_all(const std::vector<CandidateResult>& results, std::uint64_t seed) {
  std::vector<Comparison> comparisons;
  for (std::size_t c = 1; c < results.size(); ++c)
    for (const Metric metric : all_metrics()) {
      Comparison comparison = compare(results[0], results[c], metric, seed);
      comparison.candidate = c;
      if (comparison.layers > 0) comparisons.push_back(comparison);
    }
  return comparisons;
}

std::vector<bool> on_front(const std::vector<CandidateResult>& results, Metric metric) {
  std::vector<FrontPoint> points;
  std::vector<std::size_t> places;
  for (std::size_t c = 0; c < results.size(); ++c) {
    const double y = results[c].mean[metric];
    if (std::isnan(y)) continue;
    points.push_back({results[c].bits, metric->more_is_better ? -y : y});
    places.push_back(c);
  }
  std::vector<bool> front(results.size(), false);
  for (const std::size_t p : pareto_front(points)) front[places[p]] = true;
  return front;
}

}  // namespace kvq
