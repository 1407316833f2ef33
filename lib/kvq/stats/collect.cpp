#include <kvq/compute/attention_moment.h>
#include <kvq/compute/blas.h>
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

/// Tokens of one task of the moments without softmax. The number is fixed, so that sums keep one order.
constexpr std::int64_t kChunkTokens = 2048;

struct Chunk {
  std::int64_t first, count;
};

std::vector<Chunk> chunks_of(std::int64_t tokens, const TokenRange& held) {
  std::vector<Chunk> chunks;
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, held.first}, std::pair{held.first + held.count, tokens}})
    for (std::int64_t first = begin; first < end; first += kChunkTokens)
      chunks.push_back({first, std::min(kChunkTokens, end - first)});
  return chunks;
}

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

/// Uncentered moment of each head of a tensor; the moments of the heads of one group are added.
/// @param counts  [T] 0: the token is in no sum; empty: all tokens count
std::vector<MomentSum> plain_moment(const ActivationTensor& tensor, int heads_per_group, const TokenRange& held,
                                    std::span<const std::uint8_t> counts = {}) {
  const auto chunks = chunks_of(tensor.tokens, held);
  const auto per_head = static_cast<std::int64_t>(chunks.size());
  std::vector<MomentSum> partial(static_cast<std::size_t>(tensor.heads * per_head));
  parallel_for(tensor.heads * per_head, [&](std::int64_t task) {
    const Chunk chunk = chunks[static_cast<std::size_t>(task % per_head)];
    std::vector<float> rows(static_cast<std::size_t>(chunk.count * tensor.dim));
    tensor.load_head(static_cast<int>(task / per_head), chunk.first, chunk.count, rows.data());
    MomentSum sum(tensor.dim);
    const auto own = counts.empty()
                         ? counts
                         : counts.subspan(static_cast<std::size_t>(chunk.first), static_cast<std::size_t>(chunk.count));
    sum.add(rows, std::vector<float>(own.begin(), own.end()));
    partial[static_cast<std::size_t>(task)] = std::move(sum);
  });
  std::vector<MomentSum> result(static_cast<std::size_t>(tensor.heads / heads_per_group), MomentSum{tensor.dim});
  for (std::int64_t task = 0; task < tensor.heads * per_head; ++task)
    result[static_cast<std::size_t>(task / per_head / heads_per_group)].add(partial[static_cast<std::size_t>(task)]);
  for (MomentSum& sum : result) sum.symmetrize();
  return result;
}

/// w_t = k_t C_Q k_t^T for rows [count, D].
std::vector<float> quadratic_form(const std::vector<float>& rows, const std::vector<double>& matrix, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t count = rows.size() / d;
  const std::vector<float> m(matrix.begin(), matrix.end());
  std::vector<float> product(rows.size()), form(count);
  blas::gemm_nn(static_cast<std::int64_t>(count), dim, dim, rows.data(), dim, m.data(), dim, false, product.data(),
                dim);
  for (std::size_t t = 0; t < count; ++t) {
    double sum = 0.0;
    for (std::size_t j = 0; j < d; ++j) sum += double{product[t * d + j]} * rows[t * d + j];
    form[t] = static_cast<float>(std::max(sum, 0.0));
  }
  return form;
}

/// Value moment weighted by k C_Q k^T (OSCAR's `compute_sst`), per KV head.
std::vector<MomentSum> sst_moment(const LayerActivations& layer, const std::vector<MomentSum>& query,
                                  const TokenRange& held) {
  const int heads = layer.geometry.num_kv_heads;
  const auto chunks = chunks_of(layer.k.tokens, held);
  const auto per_head = static_cast<std::int64_t>(chunks.size());
  std::vector<std::vector<double>> c_q;
  c_q.reserve(query.size());
  for (const MomentSum& sum : query) c_q.push_back(mean_moment(sum));
  std::vector<MomentSum> partial(static_cast<std::size_t>(heads * per_head));
  parallel_for(heads * per_head, [&](std::int64_t task) {
    const int h = static_cast<int>(task / per_head);
    const Chunk chunk = chunks[static_cast<std::size_t>(task % per_head)];
    std::vector<float> k(static_cast<std::size_t>(chunk.count * layer.k.dim)),
        v(static_cast<std::size_t>(chunk.count * layer.v->dim));
    layer.k.load_head(h, chunk.first, chunk.count, k.data());
    layer.v->load_head(h, chunk.first, chunk.count, v.data());
    MomentSum sum(layer.v->dim);
    sum.add(v, quadratic_form(k, c_q[static_cast<std::size_t>(h)], layer.k.dim));
    partial[static_cast<std::size_t>(task)] = std::move(sum);
  });
  std::vector<MomentSum> result(static_cast<std::size_t>(heads), MomentSum{layer.v->dim});
  for (std::int64_t task = 0; task < heads * per_head; ++task)
    result[static_cast<std::size_t>(task / per_head)].add(partial[static_cast<std::size_t>(task)]);
  for (MomentSum& sum : result) sum.symmetrize();
  return result;
}

/// Softmax-weighted moments of all heads and sequences. The same pass fills the sample's value weights.
class AttentionPass {
 public:
  /// @param counts  [T] whose queries count; empty: all
  AttentionPass(const LayerActivations& layer, bool scored_query, const TokenRange& held,
                std::span<const std::uint8_t> counts, LayerStats& stats)
      : layer_(layer),
        geometry_(layer.geometry),
        scored_query_(scored_query),
        held_(held),
        counts_(counts),
        stats_(stats) {
    stats.sample.value_weight.assign(static_cast<std::size_t>(stats.sample.size() * geometry_.num_kv_heads), 0.0f);
  }

  void run(const std::function<void(std::int64_t, std::int64_t)>& on_tokens) {
    std::vector<MomentSum> outputs, scored;
    const std::int64_t total = layer_.k.tokens * geometry_.num_kv_heads;
    std::int64_t done = 0;
    for (int h = 0; h < geometry_.num_kv_heads; ++h) {
      AttentionMoments sums{MomentSum{geometry_.v_head_dim}, MomentSum{scored_query_ ? geometry_.head_dim : 0}, {}};
      for (std::size_t s = 0; s + 1 < layer_.cu_seqlens.size(); ++s) {
        const std::int64_t first = layer_.cu_seqlens[s], count = layer_.cu_seqlens[s + 1] - first;
        add_sequence(h, first, count, sums);
        if (held_.count > 0 && held_.first == first) subtract_held_out(h, sums);
        done += count;
        if (on_tokens) on_tokens(done, total);
      }
      sums.outputs.symmetrize();
      outputs.push_back(std::move(sums.outputs));
      if (scored_query_) {
        // The moment is not divided by the sum of its weights: C_SQ is a mean over queries (formats/stats.md).
        sums.scored_query.weight = static_cast<double>(counted_tokens()) * geometry_.queries_per_kv_head();
        sums.scored_query.symmetrize();
        scored.push_back(std::move(sums.scored_query));
      }
    }
    stats_.moments[Moment::scored_value] = std::move(outputs);
    if (scored_query_) stats_.moments[Moment::scored_query] = std::move(scored);
  }

 private:
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
  void subtract_held_out(int kv_head, AttentionMoments& sums) {
    AttentionMoments own{MomentSum{geometry_.v_head_dim}, MomentSum{scored_query_ ? geometry_.head_dim : 0}, {}};
    add_attention_moments(load(kv_head, held_.first, held_.count).input, scored_query_, own);
    sums.outputs.subtract(own.outputs);
    if (scored_query_) sums.scored_query.subtract(own.scored_query);
  }

  /// Rows of one head and its queries; `input` points into the vectors, which keep their memory when moved.
  struct Loaded {
    std::vector<float> q, k, v;
    AttentionInput input;
  };
  Loaded load(int kv_head, std::int64_t first, std::int64_t count) const {
    const int group = geometry_.queries_per_kv_head();
    const auto n = static_cast<std::size_t>(count);
    Loaded loaded{std::vector<float>(n * static_cast<std::size_t>(group * geometry_.head_dim)),
                  std::vector<float>(n * static_cast<std::size_t>(geometry_.head_dim)),
                  std::vector<float>(n * static_cast<std::size_t>(geometry_.v_head_dim)),
                  {}};
    parallel_for(group, [&](std::int64_t g) {
      layer_.q.load_head(kv_head * group + static_cast<int>(g), first, count,
                         loaded.q.data() + g * count * geometry_.head_dim);
    });
    layer_.k.load_head(kv_head, first, count, loaded.k.data());
    layer_.v->load_head(kv_head, first, count, loaded.v.data());
    loaded.input = {
        .tokens = count,
        .queries = group,
        .dim = geometry_.head_dim,
        .v_dim = geometry_.v_head_dim,
        .scale = geometry_.softmax_scale,
        .window = geometry_.sliding_window,
        .cap = geometry_.logit_softcap,
        .sinks = geometry_.sinks_of(kv_head),
        .q = loaded.q.data(),
        .k = loaded.k.data(),
        .v = loaded.v.data(),
        .counts = counts_.empty() ? nullptr : counts_.data() + first,
    };
    return loaded;
  }

  void add_sequence(int kv_head, std::int64_t first, std::int64_t count, AttentionMoments& sums) {
    const int group = geometry_.queries_per_kv_head();
    add_attention_moments(load(kv_head, first, count).input, scored_query_, sums);
    for (std::size_t i = 0; i < stats_.sample.token.size(); ++i) {
      const std::int64_t t = stats_.sample.token[i] - first;
      if (t >= 0 && t < count)
        stats_.sample
            .value_weight[i * static_cast<std::size_t>(geometry_.num_kv_heads) + static_cast<std::size_t>(kv_head)] =
            static_cast<float>(sums.column_energy[static_cast<std::size_t>(t)] / group);
    }
  }

  const LayerActivations& layer_;
  const LayerGeometry& geometry_;
  bool scored_query_;
  TokenRange held_;
  std::span<const std::uint8_t> counts_;
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
  std::vector<double> metric;
  for (std::size_t h = 0; h < static_cast<std::size_t>(g.num_kv_heads); ++h) {
    MomentSum sum(g.v_head_dim);
    std::vector<float> columns(rows * d);
    for (std::size_t q = h * group; q < (h + 1) * group; ++q) {
      for (std::size_t r = 0; r < rows; ++r)
        std::copy_n(layer.o_proj.data() + r * wide + q * d, d, columns.data() + r * d);
      sum.add(columns);
    }
    sum.symmetrize();
    metric.insert(metric.end(), sum.sum.begin(), sum.sum.end());
  }
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

LayerStats collect(const LayerActivations& layer, const StatsRequest& request,
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
  if (wants(Moment::query) || wants(Moment::sst))
    stats.moments[Moment::query] = plain_moment(layer.q, layer.geometry.queries_per_kv_head(), held, counts);
  if (wants(Moment::key)) stats.moments[Moment::key] = plain_moment(layer.k, 1, held);
  if (wants(Moment::value)) stats.moments[Moment::value] = plain_moment(*layer.v, 1, held);
  if (wants(Moment::sst)) stats.moments[Moment::sst] = sst_moment(layer, stats.moments[Moment::query], held);
  if (needs_attention(request)) AttentionPass(layer, wants(Moment::scored_query), held, counts, stats).run(on_tokens);
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
