#pragma once

#include <kvq/eval/evaluate.h>
#include <kvq/eval/summary.h>

#include <cstdint>
#include <vector>

namespace kvq {

/// Whether `own` is a better value of the metric than `first`. False if either is NaN.
bool is_better(Metric metric, double own, double first);

/// One metric of a candidate against the first candidate.
struct Comparison {
  std::size_t candidate = 0;
  Metric metric{std::size_t{0}};
  PairedChange change;                   ///< over (layer, KV head), or over layers if the metric has no values per head
  int wins = 0, losses = 0, layers = 0;  ///< layers with a better value, layers with a worse value, all layers compared
};

/// Compares all candidates with the first, for all metrics that both have.
/// @param seed  of the bootstrap samples
std::vector<Comparison> compare_all(const std::vector<CandidateResult>& results, std::uint64_t seed);

/// Which candidates are on the front of a metric against effective bits. A candidate without the metric is not.
/// @return  [results]
std::vector<bool> on_front(const std::vector<CandidateResult>& results, Metric metric);

}  // namespace kvq
