#include <kvq/core/error.h>
#include <kvq/diff/measured_readings.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

/// The same part of three candidates: a layer, a head, or means over layers.
struct Measured {
  const Values &before, &after, &exact;
};

/// The mean stands for the distribution of a metric that has one.
void add_values(const std::string& scope, const std::string& where, const Measured& values, bool of_heads,
                std::vector<Reading>& readings) {
  for (const Metric metric : all_metrics()) {
    if (metric->on_request || (metric->per_query && !of_heads) || std::isnan(values.exact[metric])) continue;
    readings.push_back({fmt::format("{}{}{}", scope, metric->name, metric->per_query ? ".mean" : ""), where,
                        values.before[metric], values.after[metric]});
  }
}

/// The distribution, or NaN in all fields if `mean` is NaN, because quantiles of NaN mean nothing.
/// @param mean  the metric's value
Distribution strict(const Distribution& distribution, double mean) {
  return std::isnan(mean) ? Distribution{kNoValue, kNoValue, kNoValue, kNoValue, kNoValue} : distribution;
}

/// A part of a candidate that has distributions: a layer, or means over layers.
struct Part {
  const Values& values;
  const Distributions& distributions;
};

void add_distributions(const std::string& scope, const std::string& where, const Part& before, const Part& after,
                       std::vector<Reading>& readings) {
  for (const Metric metric : all_metrics()) {
    if (!metric->per_query) continue;
    const Distribution a = strict(before.distributions[metric], before.values[metric]);
    const Distribution b = strict(after.distributions[metric], after.values[metric]);
    for (const DistributionPart& part : distribution_parts())
      readings.push_back({fmt::format("{}{}.{}", scope, metric->name, part.name), where, a.*part.value, b.*part.value});
  }
}

/// If the logits are not finite, the attention weights mean nothing, so sound() sets the metrics of weights to NaN.
Values sound(Values values) {
  if (std::isfinite(values[Metric("logit_rel_mse")])) return values;
  for (const Metric metric : all_metrics())
    if (metric->of_weights) values[metric] = kNoValue;
  return values;
}

/// Means over layers that become NaN if any layer has NaN where the metric applies. (CandidateResult::mean skips NaN,
/// which stands for "does not apply".)
Values strict_mean(const CandidateResult& result, const CandidateResult& exact) {
  Values mean = sound(result.mean);
  for (std::size_t l = 0; l < result.layers.size(); ++l) {
    const Values values = sound(result.layers[l].values);
    for (const Metric metric : all_metrics())
      if (std::isnan(values[metric]) && !std::isnan(exact.layers[l].values[metric])) mean[metric] = kNoValue;
  }
  return mean;
}

bool has_layer(const Artifact& artifact, int layer) {
  return std::any_of(artifact.layers.begin(), artifact.layers.end(),
                     [layer](const LayerPlan& plan) { return plan.layer == layer; });
}

std::vector<int> common_layers(const Dump& dump, const Artifact& before, const Artifact& after) {
  std::vector<int> layers;
  for (const LayerEntry& entry : dump.model().layers)
    if (has_layer(before, entry.layer) && has_layer(after, entry.layer)) layers.push_back(entry.layer);
  if (layers.empty()) throw Error{ErrorKind::bad_input, "the dump has none of the layers of both artifacts"};
  return layers;
}

Candidate candidate_of(const char* name, DiffFile file) {
  std::string method = file.artifact.calibration.method;
  return {
      .name = name,
      .path = std::move(file.path),
      .method = std::move(method),
      .temporary = false,
      .artifact = std::move(file.artifact),
      .scheme = {},
  };
}

/// Exact rows. Where a metric does not apply to the dump, it is NaN for exact rows, too. A NaN in another place is a
/// fault.
Candidate exact_candidate() {
  Scheme exact{"exact", [](const LayerGeometry&, int, std::uint64_t, bool) { return StoredLayer{}; }};
  return {
      .name = "exact",
      .path = {},
      .method = {},
      .temporary = false,
      .artifact = {},
      .scheme = std::move(exact),
  };
}

}  // namespace

std::vector<Reading> diff_results(const CandidateResult& before, const CandidateResult& after,
                                  const CandidateResult& exact, bool budgets) {
  std::vector<Reading> readings;
  const Values before_mean = strict_mean(before, exact), after_mean = strict_mean(after, exact);
  add_values("", "", {before_mean, after_mean, exact.mean}, false, readings);
  add_distributions("", "", {before_mean, before.distributions}, {after_mean, after.distributions}, readings);
  for (std::size_t l = 0; l < after.layers.size(); ++l) {
    const LayerResult &a = before.layers[l], &b = after.layers[l], &none = exact.layers[l];
    const std::string where = fmt::format("layer {}", b.layer);
    const std::size_t first = readings.size();
    const Values a_values = sound(a.values), b_values = sound(b.values);
    add_values("layers.", where, {a_values, b_values, none.values}, false, readings);
    add_distributions("layers.", where, {a_values, a.distributions}, {b_values, b.distributions}, readings);
    for (std::size_t h = 0; h < b.heads.size(); ++h) {
      const Values a_head = sound(a.heads[h]), b_head = sound(b.heads[h]);
      add_values("heads.", fmt::format("{} head {}", where, h), {a_head, b_head, none.heads[h]}, true, readings);
    }
    const bool resized = budgets && (a.k_code_bits != b.k_code_bits || a.v_code_bits != b.v_code_bits);
    for (std::size_t r = first; r < readings.size(); ++r) readings[r].resized = resized;
  }
  return readings;
}

bool nothing_coded(const CandidateResult& result) {
  constexpr Metric kKeys{"k_rel_mse"}, kValues{"v_rel_mse"};
  bool has_codes = false;
  for (const LayerResult& layer : result.layers) {
    has_codes = has_codes || layer.k_code_bits < 16.0 || layer.v_code_bits < 16.0;
    // These errors are over the tokens that are codes at the end of a sequence; exact tokens have error 0.
    if (layer.values[kKeys] != 0.0) return false;
    if (layer.v_code_bits < 16.0 && layer.values[kValues] != 0.0) return false;
  }
  return has_codes;
}

MeasuredDiff measure_diff(const Dump& dump, DiffFile before, DiffFile after, EvalRequest request,
                          const std::function<void(double, const std::string&)>& say) {
  request.layers = common_layers(dump, before.artifact, after.artifact);
  const bool budgets = !before.artifact.calibration.budget.is_null() && !after.artifact.calibration.budget.is_null();
  std::vector<Candidate> candidates;
  candidates.push_back(candidate_of("old", std::move(before)));
  candidates.push_back(candidate_of("new", std::move(after)));
  for (const Candidate& candidate : candidates) check_model(candidate, dump.model(), request.layers);
  candidates.push_back(exact_candidate());
  const std::vector<CandidateResult> results = evaluate(dump, candidates, request, say);
  MeasuredDiff diff{
      .readings = diff_results(results[0], results[1], results[2], budgets),
      .nothing_coded = nothing_coded(results[0]) || nothing_coded(results[1]),
  };
  if (diff.nothing_coded)
    std::erase_if(diff.readings, [](const Reading& reading) { return needs_codes(reading.metric); });
  return diff;
}

}  // namespace kvq
