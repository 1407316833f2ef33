#include "eval/report.h"

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
                     [&](const CandidateResult& result) { return !std::isnan(value_of(result.mean, metric)); });
}

std::string error_table(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  constexpr Metric kColumns[] = {Metric::k_rel_mse,   Metric::v_rel_mse,      Metric::logit_rel_mse,
                                 Metric::sv_rel_mse,  Metric::output_rel_mse, Metric::o_proj_rel_mse,
                                 Metric::output_nats, Metric::top10_overlap};
  Rows rows{{"scheme", "bits"}};
  for (const Metric metric : kColumns)
    if (has(results, metric)) rows[0].emplace_back(row_of(metric).header);
  for (std::size_t c = 0; c < results.size(); ++c) {
    rows.push_back({short_name(candidates[c]), fmt::format("{:.2f}", results[c].bits)});
    for (const Metric metric : kColumns)
      if (has(results, metric)) rows.back().push_back(number_text(value_of(results[c].mean, metric)));
  }
  return format_table(rows, all_right(rows[0].size()));
}

std::string kl_table(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  Rows rows{{"scheme", "KL mean", "median", "p95", "p99", "max", "RoPE MAE"}};
  for (std::size_t c = 0; c < results.size(); ++c) {
    const Distribution& kl = results[c].kl;
    rows.push_back({short_name(candidates[c]), number_text(kl.mean), number_text(kl.median), number_text(kl.p95),
                    number_text(kl.p99), number_text(kl.max),
                    number_text(value_of(results[c].mean, Metric::rope_logit_mae))});
  }
  return format_table(rows, all_right(rows[0].size()));
}

std::string change_text(const Comparison& comparison) {
  return fmt::format("{} [{}, {}]", percent(comparison.change.change), percent(comparison.change.low),
                     percent(comparison.change.high));
}

std::string comparison_table(const std::vector<Candidate>& candidates, const std::vector<Comparison>& comparisons) {
  Rows rows{{"against " + short_name(candidates[0]), "output", "wins", "KL", "wins"}};
  const auto find = [&](std::size_t c, Metric metric) -> const Comparison* {
    const auto it = std::find_if(comparisons.begin(), comparisons.end(),
                                 [&](const Comparison& own) { return own.candidate == c && own.metric == metric; });
    return it == comparisons.end() ? nullptr : &*it;
  };
  for (std::size_t c = 1; c < candidates.size(); ++c) {
    rows.push_back({short_name(candidates[c])});
    for (const Metric metric : {Metric::output_rel_mse, Metric::attention_kl}) {
      const Comparison* own = find(c, metric);
      rows.back().push_back(own ? change_text(*own) : "-");
      rows.back().push_back(own ? fmt::format("{}/{}", own->wins, own->layers) : "-");
    }
  }
  return format_table(rows, all_right(rows[0].size()));
}

Json number_json(double x) { return std::isfinite(x) ? Json(x) : Json(); }

void add_values(const Values& values, bool with_kl, Json& json) {
  for (const MetricRow& row : metric_rows()) {
    if (row.metric == Metric::attention_kl && !with_kl) continue;
    const double x = value_of(values, row.metric);
    if (!std::isnan(x)) json[std::string(row.name)] = number_json(x);
  }
}

Json kl_json(const Distribution& kl) {
  return {{"mean", kl.mean}, {"median", kl.median}, {"p95", kl.p95}, {"p99", kl.p99}, {"max", kl.max}};
}

Json layer_json(const LayerResult& layer) {
  Json json = {{"index", layer.layer}, {"k_effective_bits", layer.k_bits}};
  if (!std::isnan(layer.v_bits)) json["v_effective_bits"] = layer.v_bits;
  add_values(layer.values, false, json);
  if (!std::isnan(value_of(layer.values, Metric::attention_kl))) json["attention_kl"] = kl_json(layer.kl);
  Json heads = Json::array(), buckets = Json::array();
  for (const Values& values : layer.heads) {
    Json head = Json::object();
    add_values(values, true, head);
    heads.push_back(std::move(head));
  }
  for (const BucketResult& bucket : layer.buckets) {
    Json entry = {{"first", bucket.first}, {"queries", bucket.queries}};
    add_values(bucket.values, true, entry);
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
  if (std::abs(x) >= 100.0) return fmt::format("{:.0f}", x);
  return std::abs(x) >= 0.001 ? fmt::format("{:.4f}", x) : fmt::format("{:.1e}", x);
}

std::string summary_tables(const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results,
                           const std::vector<Comparison>& comparisons) {
  std::string text = error_table(candidates, results) + "\n" + kl_table(candidates, results);
  if (candidates.size() > 1) text += "\n" + comparison_table(candidates, comparisons);
  return text;
}

std::string layer_table(Metric metric, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results) {
  const MetricRow& row = row_of(metric);
  const auto change = [&](double first, double own) {
    return row.more_is_better ? fmt::format("{:+.4f}", own - first) : percent(first > 0.0 ? own / first - 1.0 : NAN);
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
           [&](std::size_t c) { return value_of(results[c].layers[l].values, metric); });
    line("mean", [&](std::size_t c) { return value_of(results[c].mean, metric); });
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
  std::string text = fmt::format("{}: {}\n", row.name, row.summary);
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
    for (std::size_t l = 0; l < results[c].layers.size(); ++l) {
      const double first = value_of(results[0].layers[l].values, metric),
                   own = value_of(results[c].layers[l].values, metric);
      wins += (row.more_is_better ? own > first : own < first) ? 1 : 0;
    }
    text += fmt::format("{} wins {}/{} layers against {}\n", printable(candidates[c].name, 200), wins,
                        results[c].layers.size(), printable(candidates[0].name, 200));
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
      for (const LayerResult& layer : result.layers) sum += value_of(layer.buckets[b].values, metric);
      rows.back().push_back(number_text(sum / static_cast<double>(result.layers.size())));
    }
  }
  return fmt::format("{} by tokens before the query, mean over layers\n", row_of(metric).name) +
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
    add_values(results[c].mean, false, mean);
    if (!std::isnan(value_of(results[c].mean, Metric::attention_kl))) mean["attention_kl"] = kl_json(results[c].kl);
    for (const LayerResult& layer : results[c].layers) layers.push_back(layer_json(layer));
    Json scheme = {{"name", candidates[c].name},
                   {"effective_bits", results[c].bits},
                   {"k_code_bits", results[c].k_code_bits},
                   {"mean", std::move(mean)},
                   {"layers", std::move(layers)}};
    if (!candidates[c].scheme) scheme["method"] = candidates[c].method;
    if (!candidates[c].scheme && !candidates[c].temporary) scheme["path"] = candidates[c].path;
    schemes.push_back(std::move(scheme));
  }
  for (const Comparison& own : comparisons)
    against.push_back({{"scheme", candidates[own.candidate].name},
                       {"against", candidates[0].name},
                       {"metric", row_of(own.metric).name},
                       {"change", number_json(own.change.change)},
                       {"interval", {number_json(own.change.low), number_json(own.change.high)}},
                       {"wins", own.wins},
                       {"losses", own.losses},
                       {"layers", own.layers}});
  return {{"schema_version", "1.0"}, {"schemes", std::move(schemes)}, {"comparisons", std::move(against)}};
}

}  // namespace kvq
