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

/// All blocks of queries of one query head, in order.
std::vector<QueryBlock> query_blocks(const LayerActivations& layer) {
  std::vector<QueryBlock> blocks;
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s)
    for (std::int64_t first = layer.cu_seqlens[s]; first < layer.cu_seqlens[s + 1]; first += AttentionBlock::kQueries)
      blocks.push_back({layer.cu_seqlens[s], first, std::min(AttentionBlock::kQueries, layer.cu_seqlens[s + 1] - first), 0});
  return blocks;
}

std::vector<float> load_rows(const ActivationTensor& tensor, int head) {
  std::vector<float> rows(static_cast<std::size_t>(tensor.tokens) * static_cast<std::size_t>(tensor.dim));
  tensor.load_head(head, 0, tensor.tokens, rows.data());
  return rows;
}

/// A side of one head: what changes, and the sums of its error.
struct SideChange {
  std::vector<float> change;  ///< 0 for sink tokens
  double error = 0.0;
};

SideChange change_of(const LayerActivations& layer, const ActivationTensor& tensor, const StoredSide& side, const ExactTokens& exact, int head,
                     const std::vector<float>& rows) {
  SideChange result{rows, 0.0};
  const auto d = static_cast<std::int64_t>(tensor.dim);
  for (std::size_t s = 0; s + 1 < layer.cu_seqlens.size(); ++s) {
    const std::int64_t first = layer.cu_seqlens[s], count = layer.cu_seqlens[s + 1] - first;
    const auto sequence = std::span(result.change).subspan(static_cast<std::size_t>(first * d), static_cast<std::size_t>(count * d));
    side.restore(tensor, first, head, sequence);
    const std::int64_t sink = std::min(exact.sink, count) * d;
    for (std::int64_t i = 0; i < count * d; ++i) {
      float& x = sequence[static_cast<std::size_t>(i)];
      x = i < sink ? 0.0f : x - rows[static_cast<std::size_t>(first * d + i)];
    }
    result.error += sum_of_squares(sequence.data(), std::max<std::int64_t>(0, exact.coded_end(count - 1)) * d);
  }
  return result;
}

class LayerMeter {
 public:
  LayerMeter(const LayerActivations& layer, std::span<const StoredLayer> schemes, bool with_windows, const std::function<void(double)>& done)
      : layer_(layer), schemes_(schemes), with_windows_(with_windows), done_(done), blocks_(query_blocks(layer)), results_(schemes.size()) {
    if (layer.v && !layer.o_proj.empty()) {
      const auto size = static_cast<std::size_t>(layer.k.tokens * layer.o_proj_rows);
      projected_.assign(size, 0.0f);
      projected_change_.assign(schemes.size(), std::vector<float>(size, 0.0f));
    }
  }

  std::vector<LayerError> measure() {
    const int heads = layer_.geometry.num_kv_heads;
    for (int head = 0; head < heads; ++head) {
      measure_head(head);
      if (done_) done_(static_cast<double>(head + 1) / heads);
    }
    for (std::size_t c = 0; c < results_.size() && !projected_.empty(); ++c) {
      results_[c].projected_energy = sum_of_squares(projected_.data(), static_cast<std::int64_t>(projected_.size()));
      results_[c].projected_error = sum_of_squares(projected_change_[c].data(), static_cast<std::int64_t>(projected_.size()));
    }
    return std::move(results_);
  }

 private:
  ExactTokens exact_of(const StoredSide* side) const { return side != nullptr && with_windows_ ? side->exact_tokens() : ExactTokens{}; }

  StoredRows stored_rows(const StoredLayer& scheme, int head, const ExactRows& rows, HeadError& error) const {
    StoredRows stored{{}, {}, {}, exact_of(scheme.k.get()), exact_of(scheme.v.get())};
    error.k_energy = sum_of_squares(rows.k.data(), static_cast<std::int64_t>(rows.k.size()));
    error.v_energy = sum_of_squares(rows.v.data(), static_cast<std::int64_t>(rows.v.size()));
    if (scheme.k) {
      SideChange keys = change_of(layer_, layer_.k, *scheme.k, stored.k_exact, head, rows.k);
      error.k_error = keys.error;
      stored.k_change = std::move(keys.change);
    }
    if (!scheme.v || rows.v.empty()) return stored;
    SideChange values = change_of(layer_, *layer_.v, *scheme.v, stored.v_exact, head, rows.v);
    error.v_error = values.error;
    stored.v_change = std::move(values.change);
    stored.v = rows.v;
    for (std::size_t i = 0; i < stored.v.size(); ++i) stored.v[i] += stored.v_change[i];
    return stored;
  }

  void measure_head(int head) {
    const ExactRows rows{load_rows(layer_.k, head), layer_.v ? load_rows(*layer_.v, head) : std::vector<float>{}};
    const int group = layer_.geometry.queries_per_kv_head();
    std::vector<StoredRows> stored;
    std::vector<HeadError> errors(schemes_.size());
    for (std::size_t c = 0; c < schemes_.size(); ++c) {
      errors[c].buckets.resize(kEdges.size());
      errors[c].divergence.resize(static_cast<std::size_t>(group * layer_.k.tokens));
      stored.push_back(stored_rows(schemes_[c], head, rows, errors[c]));
    }
    // [blocks][schemes], added in the blocks' order afterwards: the sums are the same for any number of threads.
    std::vector<std::vector<AttentionSums>> partial(blocks_.size(), std::vector<AttentionSums>(schemes_.size()));
    parallel_for(static_cast<std::int64_t>(blocks_.size()), [&](std::int64_t task) {
      const std::size_t index = blocks_.size() - 1 - static_cast<std::size_t>(task);  // the longest rows first
      AttentionBlock attention(layer_.geometry);
      std::vector<float> q(static_cast<std::size_t>(blocks_[index].count) * static_cast<std::size_t>(layer_.geometry.head_dim));
      for (int g = 0; g < group; ++g) {
        QueryBlock block = blocks_[index];
        block.q_head = head * group + g;
        layer_.q.load_head(block.q_head, block.first, block.count, q.data());
        attention.look(block, q, rows);
        project(block, attention.outputs(), projected_);
        for (std::size_t c = 0; c < schemes_.size(); ++c) {
          const auto divergence = std::span(errors[c].divergence).subspan(static_cast<std::size_t>(g * layer_.k.tokens + block.first), static_cast<std::size_t>(block.count));
          attention.compare(rows, stored[c], curvature(block.q_head), partial[index][c], divergence);
          if (!projected_.empty()) project(block, attention.change(), projected_change_[c]);
        }
      }
    });
    for (std::size_t b = 0; b < blocks_.size(); ++b)
      for (std::size_t c = 0; c < schemes_.size(); ++c) errors[c].buckets[bucket_of(blocks_[b].first - blocks_[b].begin)] += partial[b][c];
    for (std::size_t c = 0; c < schemes_.size(); ++c) results_[c].heads.push_back(std::move(errors[c]));
  }

  std::span<const float> curvature(int q_head) const {
    if (layer_.output_curvature.empty()) return {};
    const auto size = static_cast<std::size_t>(layer_.geometry.v_head_dim) * static_cast<std::size_t>(layer_.geometry.v_head_dim);
    return std::span(layer_.output_curvature).subspan(static_cast<std::size_t>(q_head) * size, size);
  }

  /// Adds one query head's part of W_o o. Heads of a token follow each other in one thread, KV heads one after the other.
  void project(const QueryBlock& block, std::span<const float> outputs, std::vector<float>& into) const {
    if (into.empty()) return;
    const std::int64_t v_dim = layer_.geometry.v_head_dim, hidden = layer_.o_proj_rows, wide = v_dim * layer_.geometry.num_q_heads;
    std::vector<float> part(static_cast<std::size_t>(block.count * hidden));
    blas::gemm_nt(block.count, hidden, v_dim, 1.0f, outputs.data(), v_dim, layer_.o_proj.data() + block.q_head * v_dim, wide, part.data(), hidden);
    float* out = into.data() + block.first * hidden;
    for (std::size_t i = 0; i < part.size(); ++i) out[i] += part[i];
  }

  const LayerActivations& layer_;
  std::span<const StoredLayer> schemes_;
  bool with_windows_;
  const std::function<void(double)>& done_;
  std::vector<QueryBlock> blocks_;
  std::vector<LayerError> results_;
  std::vector<float> projected_;                      ///< [T, hidden] W_o o
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
  return *this;
}

std::span<const std::int64_t> context_edges() { return kEdges; }

AttentionSums HeadError::total() const {
  AttentionSums sum;
  for (const AttentionSums& bucket : buckets) sum += bucket;
  return sum;
}

std::vector<LayerError> attention_errors(const LayerActivations& layer, std::span<const StoredLayer> schemes, bool with_windows,
                                         const std::function<void(double)>& done) {
  return LayerMeter(layer, schemes, with_windows, done).measure();
}

}  // namespace kvq
