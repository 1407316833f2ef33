#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/stats/collect.h>
#include <kvq/stats/golden_tokens.h>
#include <kvq/stats/token_ranges.h>

#include <cmath>

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace kvq {

namespace {

/// Which tokens' queries count, [T] of 0 and 1; empty if all do. @throws Error{usage}
std::vector<std::uint8_t> counted_queries(const LayerActivations& layer, Queries queries, const TokenRange& held) {
  if (queries == Queries::all) return {};
  const auto refuse = [&](const std::string& why) {
    throw Error{ErrorKind::usage, fmt::format("layer {}: --queries {}: {}", layer.layer, to_string(queries), why),
                "dump_qkv.py --generate marks the tokens that the model produces"};
  };
  if (layer.generated.empty()) refuse("the dump has no /generated");
  std::vector<std::uint8_t> counts = layer.generated;
  if (queries == Queries::prompt)
    for (std::uint8_t& flag : counts) flag = flag == 0 ? 1 : 0;
  bool any = false;
  for (std::int64_t t = 0; t < layer.k.tokens; ++t)
    any = any || (counts[static_cast<std::size_t>(t)] != 0 && !held.contains(t));
  if (!any) refuse(fmt::format("none of the {} tokens in the sums is one", layer.k.tokens - held.count));
  return counts;
}

MomentRequest all_but(const TokenRange& held) { return {.skipped_first = held.first, .skipped_count = held.count}; }

/// Value moment weighted by k C_Q k^T (OSCAR's `compute_sst`), per KV head.
std::vector<MomentSum> sst_moment(const LayerActivations& layer, const std::vector<MomentSum>& query,
                                  const TokenRange& held, Backend& backend) {
  std::vector<double> c_q;
  for (const MomentSum& sum : query) {
    const std::vector<double> mean = mean_moment(sum);
    c_q.insert(c_q.end(), mean.begin(), mean.end());
  }
  MomentRequest request = all_but(held);
  const std::vector<float> weights = backend.quadratic_forms(layer.k.view(), c_q, request);
  request.weights = weights;
  return backend.second_moments(layer.v->view(), request);
}

/// Softmax-weighted moments of all heads and sequences. The same pass fills the sample's value weights.
class AttentionPass {
 public:
  /// @param counts  [T] whose queries count; empty: all
  AttentionPass(const LayerActivations& layer, bool scored_query, const TokenRange& held,
                std::span<const std::uint8_t> counts, Backend& backend, LayerStats& stats)
      : layer_(layer),
        geometry_(layer.geometry),
        scored_query_(scored_query),
        held_(held),
        counts_(counts),
        backend_(backend),
        stats_(stats) {
    stats.sample.value_weight.assign(static_cast<std::size_t>(stats.sample.size() * geometry_.num_kv_heads), 0.0f);
  }

  void run(const std::function<void(std::int64_t, std::int64_t)>& on_tokens) {
    const std::int64_t total = layer_.k.tokens * geometry_.num_kv_heads;
    std::int64_t done = 0;
    std::vector<AttentionMoments> sums = no_moments();
    for (std::size_t s = 0; s + 1 < layer_.cu_seqlens.size(); ++s) {
      const std::int64_t first = layer_.cu_seqlens[s], count = layer_.cu_seqlens[s + 1] - first;
      backend_.add_attention_moments(sequence(first, count), scored_query_, sums, [&] {
        done += count;
        if (on_tokens) on_tokens(done, total);
      });
      weigh_sample(first, count, sums);
      if (held_.count > 0 && held_.first == first) subtract_held_out(sums);
    }
    std::vector<MomentSum> outputs, scored;
    for (AttentionMoments& head : sums) {
      head.outputs.symmetrize();
      outputs.push_back(std::move(head.outputs));
      if (!scored_query_) continue;
      // The moment is not divided by the sum of its weights: C_SQ is a mean over queries (formats/stats.md).
      head.scored_query.weight = static_cast<double>(counted_tokens()) * geometry_.queries_per_kv_head();
      head.scored_query.symmetrize();
      scored.push_back(std::move(head.scored_query));
    }
    stats_.moments[Moment::scored_value] = std::move(outputs);
    if (scored_query_) stats_.moments[Moment::scored_query] = std::move(scored);
  }

 private:
  std::vector<AttentionMoments> no_moments() const {
    return std::vector<AttentionMoments>(
        static_cast<std::size_t>(geometry_.num_kv_heads),
        {MomentSum{geometry_.v_head_dim}, MomentSum{scored_query_ ? geometry_.head_dim : 0}, {}});
  }
  SequenceAttention sequence(std::int64_t first, std::int64_t count) const {
    return {
        .geometry = geometry_,
        .q = layer_.q.view(),
        .k = layer_.k.view(),
        .v = layer_.v->view(),
        .first = first,
        .count = count,
        .counts = counts_.empty() ? nullptr : counts_.data(),
    };
  }

  /// Tokens whose queries are in the sums.
  std::int64_t counted_tokens() const {
    if (counts_.empty()) return layer_.k.tokens - held_.count;
    std::int64_t count = 0;
    for (std::int64_t t = 0; t < layer_.k.tokens; ++t)
      count += counts_[static_cast<std::size_t>(t)] != 0 && !held_.contains(t) ? 1 : 0;
    return count;
  }

  /// Subtracts what the held-out tokens added to the sums. Attention is causal, so the first tokens of a sequence add
  /// the same with and without later tokens.
  void subtract_held_out(std::vector<AttentionMoments>& sums) {
    std::vector<AttentionMoments> own = no_moments();
    backend_.add_attention_moments(sequence(held_.first, held_.count), scored_query_, own, {});
    for (std::size_t h = 0; h < sums.size(); ++h) {
      sums[h].outputs.subtract(own[h].outputs);
      if (scored_query_) sums[h].scored_query.subtract(own[h].scored_query);
    }
  }

  /// Value weights of the sampled tokens of one sequence, from its column energies.
  void weigh_sample(std::int64_t first, std::int64_t count, const std::vector<AttentionMoments>& sums) {
    const std::size_t heads = sums.size();
    for (std::size_t i = 0; i < stats_.sample.token.size(); ++i) {
      const std::int64_t t = stats_.sample.token[i] - first;
      if (t < 0 || t >= count) continue;
      for (std::size_t h = 0; h < heads; ++h)
        stats_.sample.value_weight[i * heads + h] =
            static_cast<float>(sums[h].column_energy[static_cast<std::size_t>(t)] / geometry_.queries_per_kv_head());
    }
  }

  const LayerActivations& layer_;
  const LayerGeometry& geometry_;
  bool scored_query_;
  TokenRange held_;
  std::span<const std::uint8_t> counts_;
  Backend& backend_;
  LayerStats& stats_;
};

/// Symmetric part of matrices [H, D, D]: the mean of each element and its mirror.
std::vector<double> symmetric_part(const std::vector<float>& matrices, std::size_t dim) {
  std::vector<double> result(matrices.size());
  for (std::size_t first = 0; first < matrices.size(); first += dim * dim)
    for (std::size_t i = 0; i < dim; ++i)
      for (std::size_t j = 0; j < dim; ++j)
        result[first + i * dim + j] =
            0.5 * (double{matrices[first + i * dim + j]} + double{matrices[first + j * dim + i]});
  return result;
}

/// [Hkv, Dv, Dv] sum over the group's query heads of W_h^T W_h: from o_proj's columns if the dump has o_proj, else from
/// the dump's o_proj_metric.
std::vector<double> o_proj_metric(const LayerActivations& layer) {
  if (!layer.v) return {};
  if (layer.o_proj.empty())
    return symmetric_part(layer.o_proj_metric, static_cast<std::size_t>(layer.geometry.v_head_dim));
  const LayerGeometry& g = layer.geometry;
  const auto d = static_cast<std::size_t>(g.v_head_dim), wide = d * static_cast<std::size_t>(g.num_q_heads);
  const auto group = static_cast<std::size_t>(g.queries_per_kv_head()),
             rows = static_cast<std::size_t>(layer.o_proj_rows);
  std::vector<double> metric(static_cast<std::size_t>(g.num_kv_heads) * d * d);
  parallel_for(g.num_kv_heads, [&](std::int64_t head) {
    const auto h = static_cast<std::size_t>(head);
    MomentSum sum(g.v_head_dim);
    std::vector<float> columns(rows * d);
    for (std::size_t q = h * group; q < (h + 1) * group; ++q) {
      for (std::size_t r = 0; r < rows; ++r)
        std::copy_n(layer.o_proj.data() + r * wide + q * d, d, columns.data() + r * d);
      sum.add(columns);
    }
    sum.symmetrize();
    std::copy(sum.sum.begin(), sum.sum.end(), metric.begin() + static_cast<std::ptrdiff_t>(h * d * d));
  });
  return metric;
}

/// Numbers below kMostMagnitude give finite sums, but their fourth powers, the weights of some moments, may overflow.
void expect_finite(int layer, Moment moment, const std::vector<MomentSum>& sums) {
  const auto is_finite = [](double x) { return std::isfinite(x); };
  for (std::size_t head = 0; head < sums.size(); ++head)
    if (const MomentSum& sum = sums[head];
        !std::ranges::all_of(sum.sum, is_finite) || !std::ranges::all_of(sum.mean, is_finite) || !is_finite(sum.weight))
      throw Error{ErrorKind::numerical,
                  fmt::format("layer {}: {} moment of head {}: expected finite sums, found NaN or infinity", layer,
                              to_string(moment), head),
                  "the dump holds numbers too large for it: --target-k and --target-v choose moments"};
}

bool needs_attention(const StatsRequest& request) {
  return request.moments.count(Moment::scored_value) || request.moments.count(Moment::scored_query);
}

}  // namespace

LayerStats collect(const LayerActivations& layer, const StatsRequest& request, Backend& backend,
                   const std::function<void(std::int64_t, std::int64_t)>& on_tokens) {
  LayerStats stats;
  stats.layer = layer.layer;
  stats.geometry = layer.geometry;
  stats.has_values = layer.v.has_value();
  stats.tokens = layer.k.tokens;
  stats.sequences = static_cast<std::int64_t>(layer.cu_seqlens.size()) - 1;
  stats.content_hash = layer.content_hash;
  append_ranges(stats.ranges, layer.ranges);
  stats.o_proj_metric = o_proj_metric(layer);
  const TokenRange held = request.held_out_tokens > 0 ? choose_held_out(layer, request.held_out_tokens) : TokenRange{};
  if (held.count > 0) stats.held_out = hold_out(layer, held);
  const TokenRange golden = choose_golden(layer, request.golden_tokens, held);
  if (golden.count > 0) stats.golden = take_golden(layer, golden);
  stats.sample = sample_tokens(layer, request.seed, request.sample_tokens, held.first, held.first + held.count);
  for (const Moment moment : request.moments)
    if (!layer.v && (side_of(moment) == Side::v || moment == Moment::scored_query))
      throw Error{ErrorKind::usage, fmt::format("layer {}: the dump has no values, so there is no {} moment",
                                                layer.layer, to_string(moment))};

  const std::vector<std::uint8_t> counts = counted_queries(layer, request.queries, held);
  const auto wants = [&](Moment moment) { return request.moments.count(moment) != 0; };
  if (wants(Moment::query) || wants(Moment::sst)) {
    const std::vector<float> weights(counts.begin(), counts.end());
    MomentRequest queries = all_but(held);
    queries.heads_per_group = layer.geometry.queries_per_kv_head();
    queries.weights = weights;
    stats.moments[Moment::query] = backend.second_moments(layer.q.view(), queries);
  }
  if (wants(Moment::key)) stats.moments[Moment::key] = backend.second_moments(layer.k.view(), all_but(held));
  if (wants(Moment::value)) stats.moments[Moment::value] = backend.second_moments(layer.v->view(), all_but(held));
  if (wants(Moment::sst)) stats.moments[Moment::sst] = sst_moment(layer, stats.moments[Moment::query], held, backend);
  if (needs_attention(request))
    AttentionPass(layer, wants(Moment::scored_query), held, counts, backend, stats).run(on_tokens);
  for (const auto& [moment, sums] : stats.moments) expect_finite(layer.layer, moment, sums);
  return stats;
}

double collect_flops(const LayerGeometry& geometry, const std::vector<std::int64_t>& cu_seqlens,
                     const StatsRequest& request) {
  const double d = geometry.head_dim, dv = geometry.v_head_dim, tokens = static_cast<double>(cu_seqlens.back());
  double flops = tokens * (geometry.num_q_heads * d * d + geometry.num_kv_heads * (d * d + dv * dv));
  if (!needs_attention(request)) return flops;
  const double products = 2.0 * d + 2.0 * dv + (request.moments.count(Moment::scored_query) ? 2.0 * dv : 0.0);
  for (std::size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const auto n = static_cast<double>(cu_seqlens[s + 1] - cu_seqlens[s]);
    const double keys =
        geometry.sliding_window > 0 ? std::min(n / 2.0, static_cast<double>(geometry.sliding_window)) : n / 2.0;
    flops += geometry.num_q_heads * n * keys * products;
  }
  return flops;
}

}  // namespace kvq
