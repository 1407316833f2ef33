#include "eval/report.h"

#include "common/plural.h"
#include "common/table.h"

#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

constexpr std::size_t kWidth = 80, kNameWidth = 24;
using Rows = std::vector<std::vector<std::string>>;

std::string percent(double change) { return std::isfinite(change) ? fmt::format("{:+.1f}%", 100.0 * change) : "-"; }

std::string short_name(const Candidate& candidate) {
  const std::string name = printable(candidate.name, 200);
  return name.size() <= kNameWidth ? name : "..." + name.substr(name.size() - (kNameWidth - 3));
}

std::string all_right(std::size_t columns) { return "l" + std::string(columns - 1, 'r'); }

bool has(const std::vector<CandidateResult>& results, Metric metric) {
  return std::any_of(results.begin(), results.end(),
                     [&](const CandidateResult& result) { return !std::isnan(result.mean[metric]); });
}

/// Whether the metric stands in distribution_table().
bool is_in_distribution_table(Metric metric) {
  return metric->per_query || metric->source == MetricSource::rope_logits;
}

/// Columns of error_table(): metrics of which less is better, then the others.
std::vector<Metric> error_columns(const std::vector<CandidateResult>& results) {
  std::vector<Metric> columns;
  for (const bool more_is_better : {false, true})
    for (const Metric metric : all_metrics())
      if (metric->more_is_better == more_is_better && !is_in_distribution_table(metric) && has(results, metric))
        columns.push_back(metric);
  return columns;
}

std::string error_table(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  const std::vector<Metric> columns = error_columns(results);
  Rows rows{{"scheme", "bits"}};
  for (const Metric metric : columns) rows[0].emplace_back(metric->header);
  for (std::size_t c = 0; c < results.size(); ++c) {
    rows.push_back({short_name(candidates[c]), fmt::format("{:.2f}", results[c].bits)});
    for (const Metric metric : columns) rows.back().push_back(number_text(results[c].mean[metric]));
  }
  return format_table(rows, all_right(rows[0].size()));
}

/// Distributions over queries, then the metrics that ignore exact windows.
std::string distribution_table(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  Rows rows{{"scheme"}};
  for (const Candidate& candidate : candidates) rows.push_back({short_name(candidate)});
  for (const Metric metric : all_metrics()) {
    if (!metric->per_query) continue;
    for (const DistributionPart& part : distribution_parts()) {
      rows[0].push_back(part.value == &Distribution::mean ? fmt::format("{} mean", metric->header) : part.name);
      for (std::size_t c = 0; c < results.size(); ++c)
        rows[c + 1].push_back(number_text(results[c].distributions[metric].*part.value));
    }
  }
  for (const Metric metric : all_metrics()) {
    if (metric->source != MetricSource::rope_logits) continue;
    rows[0].emplace_back(metric->header);
    for (std::size_t c = 0; c < results.size(); ++c) rows[c + 1].push_back(number_text(results[c].mean[metric]));
  }
  return format_table(rows, all_right(rows[0].size()));
}

std::string change_text(const Comparison& comparison) {
  return fmt::format("{} [{}, {}]", percent(comparison.change.change), percent(comparison.change.low),
                     percent(comparison.change.high));
}

std::string comparison_table(const std::vector<Candidate>& candidates, const std::vector<Comparison>& comparisons) {
  constexpr Metric kColumns[] = {Metric("output_rel_mse"), Metric("attention_kl")};
  Rows rows{{"against " + short_name(candidates[0])}};
  for (const Metric metric : kColumns) rows[0].insert(rows[0].end(), {std::string(metric->header), "wins"});
  const auto find = [&](std::size_t c, Metric metric) -> const Comparison* {
    const auto it = std::find_if(comparisons.begin(), comparisons.end(),
                                 [&](const Comparison& own) { return own.candidate == c && own.metric == metric; });
    return it == comparisons.end() ? nullptr : &*it;
  };
  for (std::size_t c = 1; c < candidates.size(); ++c) {
    rows.push_back({short_name(candidates[c])});
    for (const Metric metric : kColumns) {
      const Comparison* own = find(c, metric);
      rows.back().push_back(own ? change_text(*own) : "-");
      rows.back().push_back(own ? fmt::format("{}/{}", own->wins, own->layers) : "-");
    }
  }
  return format_table(rows, all_right(rows[0].size()));
}

Json number_json(double x) { return std::isfinite(x) ? Json(x) : Json(); }

void add_values(const Values& values, Json& json) {
  for (const Metric metric : all_metrics())
    if (!std::isnan(values[metric])) json[std::string(metric->name)] = number_json(values[metric]);
}

Json distribution_json(const Distribution& distribution) {
  Json json = Json::object();
  for (const DistributionPart& part : distribution_parts()) json[part.name] = distribution.*part.value;
  return json;
}

/// Adds the values, but the distribution of a metric that has one.
void add_values(const Values& values, const Distributions& distributions, Json& json) {
  add_values(values, json);
  for (const Metric metric : all_metrics())
    if (metric->per_query && !std::isnan(values[metric]))
      json[std::string(metric->name)] = distribution_json(distributions[metric]);
}

Json layer_json(const LayerResult& layer) {
  Json json = {{"index", layer.layer}, {"k_effective_bits", layer.k_bits}};
  if (!std::isnan(layer.v_bits)) json["v_effective_bits"] = layer.v_bits;
  add_values(layer.values, layer.distributions, json);
  Json heads = Json::array(), buckets = Json::array();
  for (const Values& values : layer.heads) {
    Json head = Json::object();
    add_values(values, head);
    heads.push_back(std::move(head));
  }
  for (const BucketResult& bucket : layer.buckets) {
    Json entry = {{"first", bucket.first}, {"queries", bucket.queries}};
    add_values(bucket.values, entry);
    buckets.push_back(std::move(entry));
  }
  json["heads"] = std::move(heads);
  if (!buckets.empty()) json["buckets"] = std::move(buckets);
  for (const RotationColumns& head : layer.rotations)
    json["rotations"].push_back({{"max_abs", head.largest},
                                 {"group_range", head.group_range},
                                 {"importance_max_over_mean", head.importance_peak},
                                 {"error_trace", head.error_trace}});
  return json;
}

}  // namespace

std::string number_text(double x) {
  if (std::isnan(x)) return "-";
  if (x == 0.0) return "0";
  if (std::abs(x) >= 1e9) return fmt::format("{:.3e}", x);
  if (std::abs(x) >= 100.0) return fmt::format("{:.0f}", x);
  return std::abs(x) >= 0.001 ? fmt::format("{:.4f}", x) : fmt::format("{:.1e}", x);
}

std::string summary_tables(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                           const std::vector<Comparison>& comparisons) {
  std::string text = error_table(candidates, results) + "\n" + distribution_table(candidates, results);
  if (candidates.size() > 1) text += "\n" + comparison_table(candidates, comparisons);
  return text;
}

std::string layer_table(Metric metric, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results) {
  const auto change = [&](double first, double own) {
    return metric->more_is_better ? fmt::format("{:+.4f}", own - first)
                                  : percent(first > 0.0 ? own / first - 1.0 : NAN);
  };
  const auto block = [&](std::size_t begin, std::size_t end) {
    Rows rows{{"layer", short_name(candidates[0])}};
    for (std::size_t c = begin; c < end; ++c) {
      rows[0].push_back(short_name(candidates[c]));
      rows[0].push_back("change");
    }
    const auto line = [&](const std::string& label, const auto& value) {
      rows.push_back({label, number_text(value(0))});
      for (std::size_t c = begin; c < end; ++c) {
        rows.back().push_back(number_text(value(c)));
        rows.back().push_back(change(value(0), value(c)));
      }
    };
    for (std::size_t l = 0; l < results[0].layers.size(); ++l)
      line(std::to_string(results[0].layers[l].layer),
           [&](std::size_t c) { return results[c].layers[l].values[metric]; });
    line("mean", [&](std::size_t c) { return results[c].mean[metric]; });
    const auto bits_line = [&](const char* label, double CandidateResult::* bits) {
      rows.push_back({label, fmt::format("{:.2f}", results[0].*bits)});
      for (std::size_t c = begin; c < end; ++c) {
        rows.back().push_back(fmt::format("{:.2f}", results[c].*bits));
        rows.back().emplace_back();
      }
    };
    bits_line("K codes", &CandidateResult::k_code_bits);
    bits_line("bits", &CandidateResult::bits);
    return rows;
  };
  std::string text = fmt::format("{}: {}\n", metric->name, metric->summary);
  std::size_t begin = 1;
  do {
    std::size_t end = std::min(begin + 1, candidates.size());
    while (end < candidates.size() && table_width(block(begin, end + 1)) <= kWidth) ++end;
    const Rows rows = block(begin, end);
    text += (begin > 1 ? "\n" : "") + format_table(rows, std::string(rows[0].size(), 'r'));
    begin = end;
  } while (begin < candidates.size());
  for (std::size_t c = 1; c < candidates.size(); ++c) {
    int wins = 0;
    for (std::size_t l = 0; l < results[c].layers.size(); ++l)
      wins += is_better(metric, results[c].layers[l].values[metric], results[0].layers[l].values[metric]) ? 1 : 0;
    text += fmt::format("{} wins {}/{} against {}\n", printable(candidates[c].name, 200), wins,
                        counted(results[c].layers.size(), "layer"), printable(candidates[0].name, 200));
  }
  return text;
}

std::string context_table(Metric metric, const std::vector<Candidate>& candidates,
                          const std::vector<CandidateResult>& results) {
  Rows rows{{"context", "queries"}};
  for (const Candidate& candidate : candidates) rows[0].push_back(short_name(candidate));
  const std::vector<BucketResult>& buckets = results[0].layers[0].buckets;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    rows.push_back({fmt::format("{}+", buckets[b].first), std::to_string(buckets[b].queries)});
    for (const CandidateResult& result : results) {
      double sum = 0.0;
      for (const LayerResult& layer : result.layers) sum += layer.buckets[b].values[metric];
      rows.back().push_back(number_text(sum / static_cast<double>(result.layers.size())));
    }
  }
  return fmt::format("{} by tokens before the query, mean over layers\n", metric->name) +
         format_table(rows, std::string(rows[0].size(), 'r'));
}

std::string rotation_columns_table(const std::vector<Candidate>& candidates,
                                   const std::vector<CandidateResult>& results) {
  Rows rows{{"layer", "scheme", "max|k|", "max-min", "importance", "tr(E_K)"}};
  for (std::size_t l = 0; l < results[0].layers.size(); ++l)
    for (std::size_t c = 0; c < results.size(); ++c) {
      const LayerResult& layer = results[c].layers[l];
      RotationColumns mean;
      const auto heads = static_cast<double>(layer.rotations.size());
      for (const RotationColumns& head : layer.rotations) {
        mean.largest = std::max(mean.largest, head.largest);
        mean.group_range += head.group_range / heads;
        mean.importance_peak += head.importance_peak / heads;
        mean.error_trace += head.error_trace / heads;
      }
      rows.push_back({c == 0 ? std::to_string(layer.layer) : "", short_name(candidates[c])});
      for (const double value : {mean.largest, mean.group_range, mean.importance_peak, mean.error_trace})
        rows.back().push_back(layer.rotations.empty() ? "-" : fmt::format("{:.2f}", value));
    }
  return "OSCAR Table 10 on the held-out keys (means over KV heads, max|k| is the largest)\n" +
         format_table(rows, "rlrrrr");
}

Json evaluation_json(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                     const std::vector<Comparison>& comparisons) {
  Json schemes = Json::array(), against = Json::array();
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    Json mean = Json::object(), layers = Json::array();
    add_values(results[c].mean, results[c].distributions, mean);
    for (const LayerResult& layer : results[c].layers) layers.push_back(layer_json(layer));
    Json scheme = {{"name", candidates[c].name},
                   {"effective_bits", results[c].bits},
                   {"k_code_bits", results[c].k_code_bits},
                   {"mean", std::move(mean)},
                   {"layers", std::move(layers)}};
    if (!candidates[c].scheme) scheme["method"] = candidates[c].method;
    if (results[c].calibrated_on) scheme["calibration_dump"] = to_string(*results[c].calibrated_on);
    if (!candidates[c].scheme && !candidates[c].temporary) scheme["path"] = candidates[c].path;
    schemes.push_back(std::move(scheme));
  }
  for (const Comparison& own : comparisons)
    against.push_back({{"scheme", candidates[own.candidate].name},
                       {"against", candidates[0].name},
                       {"metric", own.metric->name},
                       {"change", number_json(own.change.change)},
                       {"interval", {number_json(own.change.low), number_json(own.change.high)}},
                       {"wins", own.wins},
                       {"losses", own.losses},
                       {"layers", own.layers}});
  return {{"schema_version", "1.1"}, {"schemes", std::move(schemes)}, {"comparisons", std::move(against)}};
}

}  // namespace kvq
