#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/eval/metrics.h>

#include <fmt/format.h>

#include <string>

namespace kvq {

namespace {

bool has_source(const MetricSums& sums, MetricSource source) {
  switch (source) {
    case MetricSource::rows: return sums.k.has_value();
    case MetricSource::queries: return sums.attention.has_value();
    case MetricSource::projection: return sums.projected.has_value();
    case MetricSource::rope_logits: return sums.rope_logit_mae.has_value();
  }
  return false;
}

}  // namespace

const std::vector<Metric>& all_metrics() {
  static const std::vector<Metric> all = [] {
    std::vector<Metric> metrics;
    metrics.reserve(std::size(kMetrics));
    for (std::size_t i = 0; i < std::size(kMetrics); ++i) metrics.emplace_back(i);
    return metrics;
  }();
  return all;
}

Metric find_metric(std::string_view name) {
  std::vector<std::string> names;
  for (const Metric metric : all_metrics()) {
    if (name == metric->name) return metric;
    names.emplace_back(metric->name);
  }
  throw Error{ErrorKind::usage, fmt::format("--metric: unknown \"{}\"", name), hint_of_names(name, names)};
}

Values no_values() {
  Values values;
  for (const Metric metric : all_metrics()) values[metric] = kNoValue;
  return values;
}

Values read_values(const MetricSums& sums) {
  Values values = no_values();
  for (const Metric metric : all_metrics())
    if (has_source(sums, metric->source)) values[metric] = metric->read(sums);
  return values;
}

}  // namespace kvq
