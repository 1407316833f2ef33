#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>
#include <kvq/compute/weight_change.h>
#include <kvq/core/error.h>
#include <kvq/eval/attention_block.h>
#include <kvq/eval/attention_error.h>

#include <algorithm>
#include <array>

namespace kvq {

namespace {

constexpr std::array<std::int64_t, 8> kEdges = {0, 64, 256, 1024, 4096, 16384, 65536, 262144};

/// Blocks never cross an edge, so a block belongs to one bucket.
static_assert(kEdges[1] % AttentionBlock::kQueries == 0);

std::size_t bucket_of(std::int64_t position) {
  return static_cast<std::size_t>(std::upper_bound(kEdges.begin(), kEdges.end(), position) - kEdges.begin()) - 1;
}

/// Queries that are measured for all KV heads before the next pass begins. W_o o, to which all heads add, is in memory
/// for one pass only.
struct Pass {
  std::size_t first_sequence = 0, end_sequence = 0;  ///< sequences whose keys the pass reads, whole
  std::int64_t begin = 0, end = 0;                   ///< tokens of the pass's queries
};

/// Passes of at most `limit` tokens, a multiple of a block. Sequences of at most `limit` tokens are not cut.
std::vector<Pass> passes_of(const std::vector<std::int64_t>& borders, std::int64_t limit) {
  std::vector<Pass> passes;
  for (std::size_t s = 0; s + 1 < borders.size(); ++s) {
    if (!passes.empty() && borders[s + 1] - passes.back().begin <= limit) {
      passes.back().end_sequence = s + 1;
      passes.back().end = borders[s + 1];
      continue;
    }
    for (std::int64_t begin = borders[s]; begin < borders[s + 1]; begin += limit)
      passes.push_back({s, s + 1, begin, std::min(begin + limit, borders[s + 1])});
  }
  return passes;
}

/// All blocks of queries of one query head, in order.
std::vector<QueryBlock> query_blocks(const std::vector<std::int64_t>& borders, const Pass& pass) {
  std::vector<QueryBlock> blocks;
  for (std::size_t s = pass.first_sequence; s < pass.end_sequence; ++s) {
    const std::int64_t end = std::min(borders[s + 1], pass.end);
    for (std::int64_t first = std::max(borders[s], pass.begin); first < end; first += AttentionBlock::kQueries)
      blocks.push_back({borders[s], first, std::min(AttentionBlock::kQueries, end - first), 0, borders[s + 1]});
  }
  return blocks;
}

/// Number of (query, key) pairs; time is proportional to it.
std::int64_t work_of(const std::vector<QueryBlock>& blocks) {
  std::int64_t work = 0;
  for (const QueryBlock& block : blocks) work += block.count * (block.first + block.count - block.begin);
  return work;
}

/// Tokens of a pass: as many as keep W_o o, exact and of all schemes, within an eighth of the layer's bytes, but at
/// least kFewest, because every pass quantizes the rows of its long sequence again.
std::int64_t tokens_at_once(const LayerActivations& layer, std::size_t schemes) {
  constexpr std::int64_t kFewest = 512;
  static_assert(kFewest % AttentionBlock::kQueries == 0);
  const auto raw = static_cast<std::int64_t>(layer.q.raw.size() + layer.k.raw.size() + layer.v->raw.size());
  const auto bytes = static_cast<std::int64_t>(sizeof(float) * (schemes + 1)) * layer.o_proj_rows;
  return std::max(kFewest, raw / 8 / bytes / AttentionBlock::kQueries * AttentionBlock::kQueries);
}

class LayerMeter {
 public:
  LayerMeter(const LayerActivations& layer, std::span<const StoredLayer> schemes, bool with_windows,
             const std::function<void(double)>& done, bool with_context)
      : layer_(layer),
        schemes_(schemes),
        with_windows_(with_windows),
        with_context_(with_context),
        projects_(layer.v && !layer.o_proj.empty()),
        done_(done),
        results_(schemes.size()),
        projected_change_(projects_ ? schemes.size() : 0) {
    HeadError empty;
    empty.buckets.resize(kEdges.size());
    empty.divergence.resize(static_cast<std::size_t>(layer.geometry.queries_per_kv_head() * layer.k.tokens));
    for (LayerError& result : results_)
      result.heads.assign(static_cast<std::size_t>(layer.geometry.num_kv_heads), empty);
  }

  std::vector<LayerError> measure() {
    const int heads = layer_.geometry.num_kv_heads;
    const std::int64_t at_once = projects_ ? tokens_at_once(layer_, schemes_.size()) : layer_.k.tokens;
    const std::vector<Pass> passes = passes_of(layer_.cu_seqlens, at_once);
    std::int64_t work = 0, finished = 0;
    for (const Pass& pass : passes) work += heads * work_of(query_blocks(layer_.cu_seqlens, pass));
    for (const Pass& pass : passes) {
      pass_ = pass;
      blocks_ = query_blocks(layer_.cu_seqlens, pass);
      clear_projections();
      for (int head = 0; head < heads; ++head) {
        measure_head(head);
        finished += work_of(blocks_);
        if (done_) done_(static_cast<double>(finished) / static_cast<double>(work));
      }
      add_projections();
    }
    return std::move(results_);
  }

 private:
  ExactTokens exact_of(const StoredSide* side) const {
    return side != nullptr && with_windows_ ? side->exact_tokens() : ExactTokens{};
  }

  /// The first token that the rows of this pass hold.
  std::int64_t base() const { return layer_.cu_seqlens[pass_.first_sequence]; }

  /// Calls step(first token, first element of the rows, elements) for each sequence of the pass.
  template <typename Step>
  void for_sequences(const ActivationTensor& tensor, const Step& step) const {
    for (std::size_t s = pass_.first_sequence; s < pass_.end_sequence; ++s) {
      const std::int64_t first = layer_.cu_seqlens[s], count = layer_.cu_seqlens[s + 1] - first;
      step(first, static_cast<std::size_t>((first - base()) * tensor.dim),
           static_cast<std::size_t>(count * tensor.dim));
    }
  }

  /// Whether this pass is the first one that reads the sequence. Only the first one adds to the sums over tokens.
  bool is_new(std::int64_t sequence_begin) const { return sequence_begin >= pass_.begin; }

  std::vector<float> load_rows(const ActivationTensor& tensor, int head) const {
    const std::int64_t count = layer_.cu_seqlens[pass_.end_sequence] - base();
    std::vector<float> rows(static_cast<std::size_t>(count * tensor.dim));
    tensor.load_head(head, base(), count, rows.data());
    return rows;
  }

  double energy_of(const ActivationTensor& tensor, const std::vector<float>& rows) const {
    double energy = 0.0;
    for_sequences(tensor, [&](std::int64_t first, std::size_t at, std::size_t size) {
      if (is_new(first)) energy += sum_of_squares(rows.data() + at, static_cast<std::int64_t>(size));
    });
    return energy;
  }

  /// Stored minus exact rows, 0 for sink tokens. Adds to `error` the squared changes of the tokens that the last query
  /// of their sequence reads as codes.
  std::vector<float> change_of(const ActivationTensor& tensor, const StoredSide& side, const ExactTokens& exact,
                               int head, const std::vector<float>& rows, double& error) const {
    std::vector<float> change = rows;
    for_sequences(tensor, [&](std::int64_t first, std::size_t at, std::size_t size) {
      const auto sequence = std::span(change).subspan(at, size);
      side.restore(tensor, first, head, sequence);
      const auto dim = static_cast<std::int64_t>(tensor.dim), count = static_cast<std::int64_t>(size) / dim;
      const auto sink = static_cast<std::size_t>(std::min(exact.sink, count) * dim);
      for (std::size_t i = 0; i < size; ++i) sequence[i] = i < sink ? 0.0f : sequence[i] - rows[at + i];
      const std::int64_t coded = std::max<std::int64_t>(0, exact.coded_end(count - 1));
      if (is_new(first)) error += sum_of_squares(sequence.data(), coded * dim);
    });
    return change;
  }

  StoredRows stored_rows(const StoredLayer& scheme, int head, const ExactRows& rows, HeadError& error) const {
    StoredRows stored{{}, {}, {}, exact_of(scheme.k.get()), exact_of(scheme.v.get())};
    error.k_energy += energy_of(layer_.k, rows.k);
    if (scheme.k) stored.k_change = change_of(layer_.k, *scheme.k, stored.k_exact, head, rows.k, error.k_error);
    if (rows.v.empty()) return stored;
    error.v_energy += energy_of(*layer_.v, rows.v);
    if (!scheme.v) return stored;
    stored.v_change = change_of(*layer_.v, *scheme.v, stored.v_exact, head, rows.v, error.v_error);
    stored.v = rows.v;
    for (std::size_t i = 0; i < stored.v.size(); ++i) stored.v[i] += stored.v_change[i];
    return stored;
  }

  void measure_head(int head) {
    const ExactRows rows{load_rows(layer_.k, head), layer_.v ? load_rows(*layer_.v, head) : std::vector<float>{}};
    const int group = layer_.geometry.queries_per_kv_head();
    std::vector<StoredRows> stored;
    std::vector<HeadError*> errors;
    for (std::size_t c = 0; c < schemes_.size(); ++c) {
      errors.push_back(&results_[c].heads[static_cast<std::size_t>(head)]);
      stored.push_back(stored_rows(schemes_[c], head, rows, *errors[c]));
    }
    // [blocks][schemes], added in the blocks' order afterwards: the sums are the same for any number of threads.
    std::vector<std::vector<AttentionSums>> partial(blocks_.size(), std::vector<AttentionSums>(schemes_.size()));
    parallel_for(static_cast<std::int64_t>(blocks_.size()), [&](std::int64_t task) {
      const std::size_t index = blocks_.size() - 1 - static_cast<std::size_t>(task);  // the longest rows first
      const std::int64_t first = blocks_[index].first, count = blocks_[index].count;
      AttentionBlock attention(layer_.geometry, with_context_);
      std::vector<float> q(static_cast<std::size_t>(count * layer_.geometry.head_dim));
      for (int g = 0; g < group; ++g) {
        const int q_head = head * group + g;
        layer_.q.load_head(q_head, first, count, q.data());
        attention.look({blocks_[index].begin - base(), first - base(), count, q_head, blocks_[index].end - base()}, q,
                       rows);
        project(q_head, first, attention.outputs(), projected_);
        for (std::size_t c = 0; c < schemes_.size(); ++c) {
          const auto place = static_cast<std::size_t>(g * layer_.k.tokens + first);
          const auto divergence = std::span(errors[c]->divergence).subspan(place, static_cast<std::size_t>(count));
          attention.compare(rows, stored[c], curvature(q_head), partial[index][c], divergence);
          if (projects_) project(q_head, first, attention.change(), projected_change_[c]);
        }
      }
    });
    for (std::size_t b = 0; b < blocks_.size(); ++b)
      for (std::size_t c = 0; c < schemes_.size(); ++c)
        errors[c]->buckets[bucket_of(blocks_[b].first - blocks_[b].begin)] += partial[b][c];
  }

  std::span<const float> curvature(int q_head) const {
    if (layer_.output_curvature.empty()) return {};
    const auto size =
        static_cast<std::size_t>(layer_.geometry.v_head_dim) * static_cast<std::size_t>(layer_.geometry.v_head_dim);
    return std::span(layer_.output_curvature).subspan(static_cast<std::size_t>(q_head) * size, size);
  }

  /// Adds one query head's part of W_o o. For a token, one thread adds the heads of a group in order, and KV heads
  /// follow each other, so that sums keep one order.
  /// @param outputs  [n, Dv] of the queries from token `first` on
  void project(int q_head, std::int64_t first, std::span<const float> outputs, std::vector<float>& into) const {
    if (!projects_) return;
    const std::int64_t v_dim = layer_.geometry.v_head_dim, wide = v_dim * layer_.geometry.num_q_heads;
    const std::int64_t hidden = layer_.o_proj_rows, count = static_cast<std::int64_t>(outputs.size()) / v_dim;
    std::vector<float> part(static_cast<std::size_t>(count * hidden));
    blas::gemm_nt(count, hidden, v_dim, 1.0f, outputs.data(), v_dim, layer_.o_proj.data() + q_head * v_dim, wide,
                  part.data(), hidden);
    float* out = into.data() + (first - pass_.begin) * hidden;
    for (std::size_t i = 0; i < part.size(); ++i) out[i] += part[i];
  }

  void clear_projections() {
    if (!projects_) return;
    const auto size = static_cast<std::size_t>((pass_.end - pass_.begin) * layer_.o_proj_rows);
    projected_.assign(size, 0.0f);
    for (std::vector<float>& change : projected_change_) change.assign(size, 0.0f);
  }

  /// Adds token by token, so that the sums do not depend on the passes.
  void add_projections() {
    if (!projects_) return;
    const std::int64_t hidden = layer_.o_proj_rows;
    for (std::int64_t row = 0; row < pass_.end - pass_.begin; ++row) {
      const double energy = sum_of_squares(projected_.data() + row * hidden, hidden);
      for (std::size_t c = 0; c < results_.size(); ++c) {
        results_[c].projected_energy += energy;
        results_[c].projected_error += sum_of_squares(projected_change_[c].data() + row * hidden, hidden);
      }
    }
  }

  const LayerActivations& layer_;
  std::span<const StoredLayer> schemes_;
  bool with_windows_, with_context_, projects_;
  const std::function<void(double)>& done_;
  Pass pass_;
  std::vector<QueryBlock> blocks_;  ///< of the pass
  std::vector<LayerError> results_;
  std::vector<float> projected_;                      ///< [tokens of the pass, hidden] W_o o
  std::vector<std::vector<float>> projected_change_;  ///< for each scheme
};

}  // namespace

AttentionSums& AttentionSums::operator+=(const AttentionSums& other) {
  queries += other.queries;
  logit_error += other.logit_error;
  logit_energy += other.logit_energy;
  sv_error += other.sv_error;
  output_error += other.output_error;
  output_energy += other.output_energy;
  curved_error += other.curved_error;
  divergence += other.divergence;
  top_hits += other.top_hits;
  top_queries += other.top_queries;
  context += other.context;
  return *this;
}

ContextSums& ContextSums::operator+=(const ContextSums& other) {
  queries += other.queries;
  divergence += other.divergence;
  top_hits += other.top_hits;
  top_queries += other.top_queries;
  return *this;
}

std::span<const std::int64_t> context_edges() { return kEdges; }

AttentionSums HeadError::total() const {
  AttentionSums sum;
  for (const AttentionSums& bucket : buckets) sum += bucket;
  return sum;
}

std::vector<LayerError> attention_errors(const LayerActivations& layer, std::span<const StoredLayer> schemes,
                                         bool with_windows, const std::function<void(double)>& done,
                                         bool with_context) {
  return LayerMeter(layer, schemes, with_windows, done, with_context).measure();
}

}  // namespace kvq
