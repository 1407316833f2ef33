#include <kvq/compute/parallel.h>
#include <kvq/eval/evaluate.h>
#include <kvq/eval/rope_logit_error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

namespace kvq {

namespace {

/// What the sums of a layer's parts have in common.
MetricSums sums_of_layer(const LayerActivations& layer) {
  return {
      .k = {},
      .v = {},
      .attention = {},
      .projected = {},
      .rope_logit_mae = {},
      .tokens = static_cast<double>(layer.k.tokens),
      .has_values = layer.v.has_value(),
      .has_curvature = !layer.output_curvature.empty(),
  };
}

void add(ErrorSum& sum, const ErrorSum& other) {
  sum.error += other.error;
  sum.energy += other.energy;
}

/// The sums of one KV head.
MetricSums sums_of_head(const HeadError& head, MetricSums sums) {
  sums.k = {head.k_error, head.k_energy};
  if (sums.has_values) sums.v = {head.v_error, head.v_energy};
  sums.attention = head.total();
  return sums;
}

/// The sums of all KV heads.
MetricSums sums_of_heads(const LayerError& error, std::span<const MetricSums> heads, MetricSums sums) {
  sums.k = ErrorSum{};
  if (sums.has_values) sums.v = ErrorSum{};
  sums.attention = AttentionSums{};
  for (const MetricSums& head : heads) {
    add(*sums.k, *head.k);
    if (sums.v) add(*sums.v, *head.v);
    *sums.attention += *head.attention;
  }
  if (error.projected_energy > 0.0) sums.projected = {error.projected_error, error.projected_energy};
  return sums;
}

Distribution distribution_over_heads(const LayerError& error, std::vector<float> HeadError::* per_query) {
  std::vector<float> numbers;
  for (const HeadError& head : error.heads)
    numbers.insert(numbers.end(), (head.*per_query).begin(), (head.*per_query).end());
  return distribution_of(std::move(numbers));
}

std::vector<BucketResult> read_buckets(const LayerError& error, const LayerActivations& layer) {
  std::vector<BucketResult> results;
  for (std::size_t b = 0; b < context_edges().size(); ++b) {
    AttentionSums bucket;
    for (const HeadError& head : error.heads) bucket += head.buckets[b];
    if (bucket.queries == 0.0) continue;
    MetricSums sums = sums_of_layer(layer);
    sums.attention = bucket;
    sums.tokens = bucket.queries / layer.geometry.num_q_heads;
    results.push_back({context_edges()[b], static_cast<std::int64_t>(bucket.queries), read_values(sums)});
  }
  return results;
}

/// Sets all metrics of a layer, its heads and its buckets.
/// @param error  null if attention was not measured
void read_metrics(const LayerActivations& layer, const LayerError* error, const RopeLogitMae& rope,
                  LayerResult& result) {
  std::vector<MetricSums> heads(result.heads.size(), sums_of_layer(layer));
  MetricSums whole = sums_of_layer(layer);
  if (error != nullptr) {
    for (std::size_t h = 0; h < heads.size(); ++h) heads[h] = sums_of_head(error->heads[h], heads[h]);
    whole = sums_of_heads(*error, heads, whole);
    for (const Metric metric : all_metrics())
      if (metric->per_query) result.distributions[metric] = distribution_over_heads(*error, metric->per_query);
    result.buckets = read_buckets(*error, layer);
  }
  whole.rope_logit_mae = rope.mean;
  result.values = read_values(whole);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    heads[h].rope_logit_mae = rope.kv_head[h];
    result.heads[h] = read_values(heads[h]);
  }
}

void add_rotations(const LayerActivations& layer, const StoredSide* keys, LayerResult& result) {
  const TensorPlan* plan = keys != nullptr ? keys->plan() : nullptr;
  if (plan == nullptr || (plan->centroids && plan->centroids->joint)) return;
  result.rotations.resize(static_cast<std::size_t>(layer.geometry.num_kv_heads));
  parallel_for(layer.geometry.num_kv_heads, [&](std::int64_t h) {
    result.rotations[static_cast<std::size_t>(h)] = rotation_columns(layer, *plan, static_cast<int>(h));
  });
}

/// A result with the sizes of what is stored, without metrics.
LayerResult start(const LayerActivations& layer, const StoredLayer& stored, std::int64_t context) {
  const LayerGeometry& g = layer.geometry;
  LayerResult result{
      .layer = layer.layer,
      .values = no_values(),
      .distributions = {},
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
    result.v_bits = result.v_code_bits = kNoValue;
  return result;
}

void average_metrics(CandidateResult& result) {
  const auto layers = static_cast<double>(result.layers.size());
  for (const Metric metric : all_metrics()) {
    double sum = 0.0, count = 0.0;
    Distribution& mean = result.distributions[metric];
    for (const LayerResult& layer : result.layers) {
      const Distribution& own = layer.distributions[metric];
      mean.mean += own.mean / layers;
      mean.median += own.median / layers;
      mean.p95 += own.p95 / layers;
      mean.p99 += own.p99 / layers;
      mean.max = std::max(mean.max, own.max);
      if (std::isnan(layer.values[metric])) continue;
      sum += layer.values[metric];
      count += 1.0;
    }
    result.mean[metric] = count > 0.0 ? sum / count : kNoValue;
  }
}

void average_bits(CandidateResult& result) {
  double elements = 0.0, k_elements = 0.0;
  for (const LayerResult& layer : result.layers) {
    result.bits += layer.k_elements * layer.k_bits + (layer.v_elements > 0.0 ? layer.v_elements * layer.v_bits : 0.0);
    result.k_code_bits += layer.k_elements * layer.k_code_bits;
    k_elements += layer.k_elements;
    elements += layer.k_elements + layer.v_elements;
  }
  result.bits /= elements;
  result.k_code_bits /= k_elements;
}

void evaluate_layer(const LayerActivations& layer, std::span<const Candidate> candidates, const EvalRequest& request,
                    const std::function<void(double)>& tell, std::span<CandidateResult> results) {
  std::vector<StoredLayer> stored;
  for (const Candidate& candidate : candidates)
    stored.push_back(candidate.of_layer(layer.geometry, layer.layer, request.seed, request.with_windows));
  std::vector<LayerError> errors;
  if (request.with_attention)
    errors = attention_errors(layer, stored, request.with_windows, tell, request.with_context);
  const RopeLogitError rope(layer, {.pairs = request.pairs, .seed = request.seed});
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    LayerResult own = start(layer, stored[c], request.context);
    if (request.rotations) add_rotations(layer, stored[c].k.get(), own);
    read_metrics(layer, errors.empty() ? nullptr : &errors[c],
                 stored[c].k ? rope.of_stored(*stored[c].k) : RopeLogitMae{0.0, std::vector<double>(own.heads.size())},
                 own);
    results[c].layers.push_back(std::move(own));
  }
}

}  // namespace

std::vector<CandidateResult> evaluate(const Dump& dump, std::vector<Candidate>& candidates, const EvalRequest& request,
                                      const std::function<void(double, const std::string&)>& say) {
  constexpr std::size_t kAtOnce = 16;
  std::vector<CandidateResult> results(candidates.size());
  const double work = static_cast<double>(candidates.size() * request.layers.size());
  double done = 0.0;
  std::map<int, std::string> layer_hashes;
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
      const LayerActivations layer = dump.load_layer(request.layers[l]);
      layer_hashes[layer.layer] = layer.content_hash;
      evaluate_layer(layer, some, request, tell, std::span(results).subspan(first, count));
      done += static_cast<double>(count);
    }
    for (std::size_t c = 0; c < count; ++c)
      if (some[c].artifact) results[first + c].calibrated_on = relation_to(*some[c].artifact, layer_hashes);
    for (Candidate* candidate : loaded) candidate->artifact.reset();
  }
  for (CandidateResult& result : results) {
    average_metrics(result);
    average_bits(result);
  }
  return results;
}

}  // namespace kvq
