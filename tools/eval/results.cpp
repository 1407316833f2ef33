#include "eval/results.h"

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvq {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

constexpr MetricRow kRows[] = {
    {Metric::k_rel_mse, "k_rel_mse", "K",
     "sum |k^ - k|^2 / sum |k|^2 over the tokens, as read from the end of a sequence"},
    {Metric::v_rel_mse, "v_rel_mse", "V", "the same of values"},
    {Metric::logit_rel_mse, "logit_rel_mse", "QK",
     "sum (l^ - l)^2 / sum l^2 of the logits l = scale q k that a query sees"},
    {Metric::rope_logit_mae, "rope_logit_mae", "RoPE MAE",
     "mean |q^T R_D (k^ - k)| over 50 offsets D (Block-GTQ B.3), without windows"},
    {Metric::sv_rel_mse, "sv_rel_mse", "SV", "sum |S (V^ - V)|^2 / sum |S V|^2, exact weights S"},
    {Metric::attention_kl, "attention_kl", "KL", "KL(p || p^) of a query's weights, nats"},
    {Metric::top10_overlap, "top10_overlap", "top-10", "part of the 10 largest weights that stay so (Block-GTQ B.4)",
     true},
    {Metric::output_rel_mse, "output_rel_mse", "output", "sum |o^ - o|^2 / sum |o|^2 of attention's outputs"},
    {Metric::o_proj_rel_mse, "o_proj_rel_mse", "o_proj",
     "the same behind the output projection, where the dump has it"},
    {Metric::output_nats, "output_nats", "nats",
     "mean 1/2 (o^ - o)^T G (o^ - o), summed over heads; G the dump's output curvature"}};
static_assert(std::size(kRows) == kNumMetrics);

double& at(Values& values, Metric metric) { return values[static_cast<std::size_t>(metric)]; }

Values no_values() {
  Values values;
  values.fill(kNone);
  return values;
}

/// Sets the metrics that are sums over queries. @param tokens  number of tokens in the sums
void add_query_values(const AttentionSums& sums, const LayerActivations& layer, double tokens, Values& values) {
  at(values, Metric::logit_rel_mse) = ratio_of(sums.logit_error, sums.logit_energy);
  at(values, Metric::attention_kl) = ratio_of(sums.divergence, sums.queries);
  if (sums.top_queries > 0.0) at(values, Metric::top10_overlap) = sums.top_hits / (10.0 * sums.top_queries);
  if (!layer.v) return;
  at(values, Metric::sv_rel_mse) = ratio_of(sums.sv_error, sums.output_energy);
  at(values, Metric::output_rel_mse) = ratio_of(sums.output_error, sums.output_energy);
  if (!layer.output_curvature.empty()) at(values, Metric::output_nats) = sums.curved_error / tokens;
}

void fill(const LayerError& error, const LayerActivations& layer, LayerResult& result) {
  const auto tokens = static_cast<double>(layer.k.tokens);
  HeadError whole;
  AttentionSums total;
  std::vector<float> divergence;
  std::vector<AttentionSums> buckets(context_edges().size());
  for (std::size_t h = 0; h < error.heads.size(); ++h) {
    const HeadError& head = error.heads[h];
    const AttentionSums sums = head.total();
    Values& values = result.heads[h];
    at(values, Metric::k_rel_mse) = ratio_of(head.k_error, head.k_energy);
    if (layer.v) at(values, Metric::v_rel_mse) = ratio_of(head.v_error, head.v_energy);
    add_query_values(sums, layer, tokens, values);
    total += sums;
    whole.k_error += head.k_error;
    whole.k_energy += head.k_energy;
    whole.v_error += head.v_error;
    whole.v_energy += head.v_energy;
    divergence.insert(divergence.end(), head.divergence.begin(), head.divergence.end());
    for (std::size_t b = 0; b < buckets.size(); ++b) buckets[b] += head.buckets[b];
  }
  at(result.values, Metric::k_rel_mse) = ratio_of(whole.k_error, whole.k_energy);
  if (layer.v) at(result.values, Metric::v_rel_mse) = ratio_of(whole.v_error, whole.v_energy);
  add_query_values(total, layer, tokens, result.values);
  if (error.projected_energy > 0.0)
    at(result.values, Metric::o_proj_rel_mse) = error.projected_error / error.projected_energy;
  result.kl = distribution_of(std::move(divergence));
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].queries == 0.0) continue;
    BucketResult bucket{context_edges()[b], static_cast<std::int64_t>(buckets[b].queries), no_values()};
    add_query_values(buckets[b], layer, buckets[b].queries / layer.geometry.num_q_heads, bucket.values);
    result.buckets.push_back(std::move(bucket));
  }
}

void add_rope(const RopeLogitMae& mae, LayerResult& result) {
  at(result.values, Metric::rope_logit_mae) = mae.mean;
  for (std::size_t h = 0; h < mae.kv_head.size(); ++h) at(result.heads[h], Metric::rope_logit_mae) = mae.kv_head[h];
}

void add_rotations(const LayerActivations& layer, const StoredSide* keys, LayerResult& result) {
  const TensorPlan* plan = keys != nullptr ? keys->plan() : nullptr;
  if (plan == nullptr || (plan->centroids && plan->centroids->joint)) return;
  result.rotations.resize(static_cast<std::size_t>(layer.geometry.num_kv_heads));
  parallel_for(layer.geometry.num_kv_heads, [&](std::int64_t h) {
    result.rotations[static_cast<std::size_t>(h)] = rotation_columns(layer, *plan, static_cast<int>(h));
  });
}

LayerResult start(const LayerActivations& layer, const StoredLayer& stored, std::int64_t context) {
  const LayerGeometry& g = layer.geometry;
  LayerResult result{
      .layer = layer.layer,
      .values = no_values(),
      .kl = {},
      .heads = std::vector<Values>(static_cast<std::size_t>(g.num_kv_heads), no_values()),
      .buckets = {},
      .rotations = {},
  };
  if (stored.k) {
    result.k_bits = stored.k->effective_bits(context);
    result.k_code_bits = stored.k->code_bits();
  }
  if (stored.v) {
    result.v_bits = stored.v->effective_bits(context);
    result.v_code_bits = stored.v->code_bits();
  }
  result.k_elements = static_cast<double>(g.num_kv_heads) * g.head_dim;
  if (layer.v)
    result.v_elements = static_cast<double>(g.num_kv_heads) * g.v_head_dim;
  else
    result.v_bits = result.v_code_bits = kNone;
  return result;
}

void summarise(CandidateResult& result) {
  const auto layers = static_cast<double>(result.layers.size());
  result.mean.fill(0.0);
  std::array<double, kNumMetrics> counts{};
  double elements = 0.0, k_elements = 0.0;
  for (const LayerResult& layer : result.layers) {
    for (std::size_t m = 0; m < kNumMetrics; ++m) {
      if (std::isnan(layer.values[m])) continue;
      result.mean[m] += layer.values[m];
      counts[m] += 1.0;
    }
    result.kl.mean += layer.kl.mean / layers;
    result.kl.median += layer.kl.median / layers;
    result.kl.p95 += layer.kl.p95 / layers;
    result.kl.p99 += layer.kl.p99 / layers;
    result.kl.max = std::max(result.kl.max, layer.kl.max);
    result.bits += layer.k_elements * layer.k_bits + (layer.v_elements > 0.0 ? layer.v_elements * layer.v_bits : 0.0);
    result.k_code_bits += layer.k_elements * layer.k_code_bits;
    k_elements += layer.k_elements;
    elements += layer.k_elements + layer.v_elements;
  }
  result.bits /= elements;
  result.k_code_bits /= k_elements;
  for (std::size_t m = 0; m < kNumMetrics; ++m) result.mean[m] = counts[m] > 0.0 ? result.mean[m] / counts[m] : kNone;
}

}  // namespace

std::span<const MetricRow> metric_rows() { return kRows; }

const MetricRow& row_of(Metric metric) { return kRows[static_cast<std::size_t>(metric)]; }

Metric find_metric(const std::string& name) {
  std::string names;
  for (const MetricRow& row : kRows) {
    if (name == row.name) return row.metric;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", row.name);
  }
  throw Error{ErrorKind::usage, fmt::format("--metric: unknown \"{}\"", name), "choose one of " + names};
}

namespace {

void evaluate_layer(const LayerActivations& layer, std::span<const Candidate> candidates, const EvalRequest& request,
                    const std::function<void(double)>& tell, std::span<CandidateResult> results) {
  std::vector<StoredLayer> stored;
  for (const Candidate& candidate : candidates)
    stored.push_back(candidate.of_layer(layer.geometry, layer.layer, request.seed, request.with_windows));
  for (std::size_t c = 0; c < candidates.size(); ++c)
    results[c].layers.push_back(start(layer, stored[c], request.context));
  if (!request.only_rope) {
    const std::vector<LayerError> errors = attention_errors(layer, stored, request.with_windows, tell);
    for (std::size_t c = 0; c < candidates.size(); ++c) fill(errors[c], layer, results[c].layers.back());
  }
  const RopeLogitError rope(layer, {.pairs = request.pairs, .seed = request.seed});
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    LayerResult& own = results[c].layers.back();
    if (request.rotations) add_rotations(layer, stored[c].k.get(), own);
    add_rope(stored[c].k ? rope.of_stored(*stored[c].k) : RopeLogitMae{0.0, std::vector<double>(own.heads.size())},
             own);
  }
}

}  // namespace

std::vector<CandidateResult> evaluate(const Dump& dump, std::vector<Candidate>& candidates, const EvalRequest& request,
                                      const std::function<void(double, const std::string&)>& say) {
  constexpr std::size_t kAtOnce = 16;
  std::vector<CandidateResult> results(candidates.size());
  const double work = static_cast<double>(candidates.size() * request.layers.size());
  double done = 0.0;
  for (std::size_t first = 0; first < candidates.size(); first += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, candidates.size() - first);
    const auto some = std::span(candidates).subspan(first, count);
    std::vector<Candidate*> loaded;
    for (Candidate& candidate : some) {
      if (candidate.scheme || candidate.artifact) continue;
      candidate.artifact = load_artifact(candidate.path);
      loaded.push_back(&candidate);
      check_model(candidate, dump.model(), request.layers);
    }
    for (std::size_t l = 0; l < request.layers.size(); ++l) {
      const std::string what = fmt::format("layer {} ({}/{})", request.layers[l], l + 1, request.layers.size());
      const auto tell = [&](double part) { say((done + part * static_cast<double>(count)) / work, what); };
      tell(0.0);
      evaluate_layer(dump.load_layer(request.layers[l]), some, request, tell, std::span(results).subspan(first, count));
      done += static_cast<double>(count);
    }
    for (Candidate* candidate : loaded) candidate->artifact.reset();
  }
  for (CandidateResult& result : results) summarise(result);
  return results;
}

std::vector<Comparison> compare_all(const std::vector<CandidateResult>& results, std::uint64_t seed) {
  std::vector<Comparison> comparisons;
  for (std::size_t c = 1; c < results.size(); ++c)
    for (const MetricRow& row : kRows) {
      Comparison comparison{.candidate = c, .metric = row.metric, .change = {}};
      std::vector<double> a, b, layers_a, layers_b;
      for (std::size_t l = 0; l < results[c].layers.size(); ++l) {
        const LayerResult &first = results[0].layers[l], &own = results[c].layers[l];
        const double x = value_of(first.values, row.metric), y = value_of(own.values, row.metric);
        if (std::isnan(x) || std::isnan(y)) continue;
        ++comparison.layers;
        layers_a.push_back(x);
        layers_b.push_back(y);
        if (row.more_is_better ? y > x : y < x) ++comparison.wins;
        if (row.more_is_better ? y < x : y > x) ++comparison.losses;
        for (std::size_t h = 0; h < own.heads.size(); ++h) {
          const double p = value_of(first.heads[h], row.metric), q = value_of(own.heads[h], row.metric);
          if (std::isnan(p) || std::isnan(q)) continue;
          a.push_back(p);
          b.push_back(q);
        }
      }
      if (layers_a.empty()) continue;
      comparison.change = a.empty() ? paired_change(layers_a, layers_b, seed)
                                    : paired_change(a, b, seed);  // o_proj mixes all heads, so it has no value per head
      comparisons.push_back(comparison);
    }
  return comparisons;
}

}  // namespace kvq
