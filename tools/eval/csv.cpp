#include "eval/csv.h"

#include "common/csv.h"

#include <kvq/core/text.h>
#include <kvq/eval/comparison.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

using Record = std::vector<std::string>;

std::string name_of(const Candidate& candidate) { return safe_line(candidate.name); }

/// Metrics that any candidate has.
std::vector<Metric> present(const std::vector<CandidateResult>& results) {
  std::vector<Metric> metrics;
  for (const Metric metric : all_metrics())
    if (std::any_of(results.begin(), results.end(),
                    [&](const CandidateResult& result) { return !std::isnan(result.mean[metric]); }))
      metrics.push_back(metric);
  return metrics;
}

/// Names of the columns of a metric: its own, then those of its distribution without the mean.
void add_header(Metric metric, Record& header) {
  header.emplace_back(metric->name);
  if (!metric->per_query) return;
  for (const DistributionPart& part : distribution_parts())
    if (part.value != &Distribution::mean) header.push_back(fmt::format("{}_{}", metric->name, part.name));
}

void add_values(Metric metric, const Values& values, const Distributions& distributions, Record& record) {
  const bool has_distribution = metric->per_query && !std::isnan(values[metric]);
  record.push_back(csv_number(has_distribution ? distributions[metric].mean : values[metric]));
  if (!metric->per_query) return;
  for (const DistributionPart& part : distribution_parts())
    if (part.value != &Distribution::mean)
      record.push_back(std::isnan(values[metric]) ? "" : csv_number(distributions[metric].*part.value));
}

std::vector<Record> summary_records(const std::vector<Candidate>& candidates,
                                    const std::vector<CandidateResult>& results) {
  const std::vector<Metric> metrics = present(results);
  std::vector<Record> records{{"scheme", "method", "path", "effective_bits", "k_code_bits"}};
  for (const Metric metric : metrics) add_header(metric, records.front());
  for (std::size_t c = 0; c < results.size(); ++c) {
    const Candidate& own = candidates[c];
    records.push_back({name_of(own), safe_line(own.method), own.temporary ? "" : safe_line(own.path),
                       csv_number(results[c].bits), csv_number(results[c].k_code_bits)});
    for (const Metric metric : metrics) add_values(metric, results[c].mean, results[c].distributions, records.back());
  }
  return records;
}

}  // namespace

std::string summary_csv(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  return format_csv(summary_records(candidates, results));
}

std::string layer_csv(Metric metric, const std::vector<Candidate>& candidates,
                      const std::vector<CandidateResult>& results) {
  std::vector<Record> records{{"layer", "scheme", "k_effective_bits", "v_effective_bits"}};
  add_header(metric, records.front());
  for (std::size_t l = 0; l < results.front().layers.size(); ++l)
    for (std::size_t c = 0; c < results.size(); ++c) {
      const LayerResult& layer = results[c].layers[l];
      records.push_back(
          {std::to_string(layer.layer), name_of(candidates[c]), csv_number(layer.k_bits), csv_number(layer.v_bits)});
      add_values(metric, layer.values, layer.distributions, records.back());
    }
  return format_csv(records);
}

std::string context_csv(Metric metric, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results) {
  std::vector<Record> records{{"context", "queries", "scheme", std::string(metric->name)}};
  const std::vector<BucketResult>& buckets = results.front().layers.front().buckets;
  for (std::size_t b = 0; b < buckets.size(); ++b)
    for (std::size_t c = 0; c < results.size(); ++c) {
      double sum = 0.0;
      for (const LayerResult& layer : results[c].layers) sum += layer.buckets[b].values[metric];
      records.push_back({std::to_string(buckets[b].first), std::to_string(buckets[b].queries), name_of(candidates[c]),
                         csv_number(sum / static_cast<double>(results[c].layers.size()))});
    }
  return format_csv(records);
}

std::string rotations_csv(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  std::vector<Record> records{
      {"layer", "kv_head", "scheme", "max_abs", "group_range", "importance_max_over_mean", "error_trace"}};
  for (std::size_t l = 0; l < results.front().layers.size(); ++l)
    for (std::size_t c = 0; c < results.size(); ++c) {
      const LayerResult& layer = results[c].layers[l];
      for (std::size_t h = 0; h < layer.rotations.size(); ++h) {
        const RotationColumns& own = layer.rotations[h];
        records.push_back({std::to_string(layer.layer), std::to_string(h), name_of(candidates[c]),
                           csv_number(own.largest), csv_number(own.group_range), csv_number(own.importance_peak),
                           csv_number(own.error_trace)});
      }
    }
  return format_csv(records);
}

std::string sweep_csv(const Sweep& sweep, const std::vector<Candidate>& candidates,
                      const std::vector<CandidateResult>& results) {
  constexpr Metric kFronts[] = {Metric("output_rel_mse"), Metric("attention_kl")};
  std::vector<Record> records = summary_records(candidates, results);
  records.front().emplace_back("flags");
  for (std::size_t c = 0; c < results.size(); ++c)
    records[c + 1].push_back(c < sweep.rows.size() ? typed_flags(sweep.rows[c]) : "");
  for (const Metric metric : kFronts) {
    const std::vector<bool> front = on_front(results, metric);
    records.front().push_back(fmt::format("pareto_{}", metric->name));
    for (std::size_t c = 0; c < results.size(); ++c) records[c + 1].emplace_back(front[c] ? "1" : "0");
  }
  const auto apart = sweep_distances(sweep, candidates);
  records.front().insert(records.front().end(), {"hamming", "high_bit_jaccard", "regret"});
  for (std::size_t c = 0; c < results.size(); ++c)
    for (double (AllocationDistance::*number)() const :
         {&AllocationDistance::hamming, &AllocationDistance::high_bit_jaccard, &AllocationDistance::regret})
      records[c + 1].push_back(apart[c] ? csv_number(((*apart[c]).*number)()) : "");
  return format_csv(records);
}

}  // namespace kvq
