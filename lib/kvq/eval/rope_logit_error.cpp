#include <kvq/eval/rope_logit_error.h>

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/dump/rope.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace kvq {

namespace {

constexpr std::size_t kNumOffsets = 50;
constexpr double kLargestOffset = 1024.0;
constexpr std::int64_t kRowsPerPiece = 64;

/// Calls body(first, count) for pieces of [0, total) with fixed borders.
template <typename Body>
void for_pieces(std::int64_t total, const Body& body) {
  parallel_for((total + kRowsPerPiece - 1) / kRowsPerPiece, [&](std::int64_t piece) {
    const std::int64_t first = piece * kRowsPerPiece;
    body(first, std::min(kRowsPerPiece, total - first));
  });
}

/// One head's rows of one side of the pairs, widened: [P, D].
void gather(const ActivationTensor& tensor, int head, const std::vector<TokenPair>& pairs,
            std::int64_t TokenPair::* token, float* out) {
  for (const TokenPair& pair : pairs) {
    tensor.load_head(head, pair.*token, 1, out);
    out += tensor.dim;
  }
}

double dot(const RopeBlock& block, const float* a, const float* b) {
  const double first = double{a[block.first]} * b[block.first];
  return block.second < 0 ? first : first + double{a[block.second]} * b[block.second];
}

/// Imaginary part of conj(a) b.
double cross(const RopeBlock& block, const float* a, const float* b) {
  return double{a[block.first]} * b[block.second] - double{a[block.second]} * b[block.first];
}

}  // namespace

std::vector<TokenPair> choose_pairs(std::int64_t tokens, const RopeLogitRequest& request) {
  KVQ_ASSERT(tokens >= 1 && request.pairs >= 1);
  const std::int64_t count = std::min(tokens, request.pairs);
  std::int64_t factor = 7919;
  while (std::gcd(factor, tokens) != 1) ++factor;
  const std::int64_t shift = 13 + 104729 * static_cast<std::int64_t>(request.seed % static_cast<std::uint64_t>(tokens));
  std::vector<TokenPair> pairs;
  pairs.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t query = i * tokens / count;
    pairs.push_back({query, (factor * query + shift) % tokens});
  }
  return pairs;
}

std::vector<double> rope_offsets() {
  std::vector<double> offsets;
  offsets.reserve(kNumOffsets);
  for (std::size_t i = 0; i < kNumOffsets; ++i)
    offsets.push_back(kLargestOffset * (2.0 * static_cast<double>(i) / static_cast<double>(kNumOffsets - 1) - 1.0));
  return offsets;
}

RopeLogitError::RopeLogitError(const LayerActivations& layer, const RopeLogitRequest& request)
    : layer_(layer),
      geometry_(layer.geometry),
      rotation_(layer.geometry.rope),
      pairs_(choose_pairs(layer.k.tokens, request)) {
  rotation_.attention_factor = 1.0;
  const std::size_t head_size = pairs_.size() * static_cast<std::size_t>(geometry_.head_dim);
  k_.resize(static_cast<std::size_t>(geometry_.num_kv_heads) * head_size);
  parallel_for(geometry_.num_kv_heads, [&](std::int64_t head) {
    gather(layer.k, static_cast<int>(head), pairs_, &TokenPair::key,
           k_.data() + static_cast<std::size_t>(head) * head_size);
  });
  still_ = rope_blocks(geometry_);
  const auto turning = still_.begin() + (rotation_.layout == RopeLayout::none ? 0 : rotation_.dim / 2);
  rotary_.assign(still_.begin(), turning);
  still_.erase(still_.begin(), turning);
  for (std::size_t j = 0; j < rotary_.size(); ++j)
    for (const double offset : rope_offsets()) {
      cos_.push_back(std::cos(offset * rotation_.inv_freq[j]));
      sin_.push_back(std::sin(offset * rotation_.inv_freq[j]));
    }
}

/// R(-p) of rows [H, P, D], each by the position of its token.
std::vector<float> RopeLogitError::turned_back(std::vector<float> rows, std::int64_t TokenPair::* token) const {
  const std::size_t d = static_cast<std::size_t>(geometry_.head_dim), head_size = pairs_.size() * d;
  for_pieces(static_cast<std::int64_t>(pairs_.size()), [&](std::int64_t first, std::int64_t count) {
    Rotator rotator(rotation_);
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(first + count); ++i) {
      rotator.set_position(-layer_.positions[static_cast<std::size_t>(pairs_[i].*token)]);
      for (std::size_t at = i * d; at < rows.size(); at += head_size) rotator.apply(rows.data() + at);
    }
  });
  return rows;
}

RopeLogitMae RopeLogitError::of_stored(const StoredSide& keys) const {
  const auto d = static_cast<std::size_t>(geometry_.head_dim);
  std::vector<std::size_t> by_key(pairs_.size());
  std::iota(by_key.begin(), by_key.end(), std::size_t{0});
  std::sort(by_key.begin(), by_key.end(), [&](std::size_t a, std::size_t b) { return pairs_[a].key < pairs_[b].key; });
  std::vector<float> error(k_.size()), rows;
  for (int head = 0; head < geometry_.num_kv_heads; ++head) {
    const std::size_t start = static_cast<std::size_t>(head) * pairs_.size() * d;
    auto pair = by_key.begin();
    for (std::size_t s = 0; s + 1 < layer_.cu_seqlens.size(); ++s) {
      const std::int64_t first = layer_.cu_seqlens[s], end = layer_.cu_seqlens[s + 1];
      rows.resize(static_cast<std::size_t>(end - first) * d);
      layer_.k.load_head(head, first, end - first, rows.data());
      keys.restore(layer_.k, first, head, rows);
      for (; pair != by_key.end() && pairs_[*pair].key < end; ++pair) {
        const float* restored = rows.data() + static_cast<std::size_t>(pairs_[*pair].key - first) * d;
        for (std::size_t j = 0; j < d; ++j) error[start + *pair * d + j] = k_[start + *pair * d + j] - restored[j];
      }
    }
  }
  return of_error(std::move(error));
}

RopeLogitMae RopeLogitError::of_error(std::vector<float> error) const {
  KVQ_ASSERT(error.size() == k_.size());
  const std::vector<float> before_rope = turned_back(std::move(error), &TokenPair::key);
  std::vector<double> q_head(static_cast<std::size_t>(geometry_.num_q_heads));
  parallel_for(geometry_.num_q_heads, [&](std::int64_t head) {
    q_head[static_cast<std::size_t>(head)] = mae_of_head(static_cast<int>(head), before_rope);
  });
  RopeLogitMae result;
  const int group = geometry_.queries_per_kv_head();
  for (auto first = q_head.begin(); first != q_head.end(); first += group)
    result.kv_head.push_back(std::accumulate(first, first + group, 0.0) / group);
  result.mean = std::accumulate(result.kv_head.begin(), result.kv_head.end(), 0.0) / geometry_.num_kv_heads;
  return result;
}

double RopeLogitError::mae_of_head(int q_head, std::span<const float> error) const {
  const auto d = static_cast<std::size_t>(geometry_.head_dim);
  std::vector<float> rows(pairs_.size() * d);
  gather(layer_.q, q_head, pairs_, &TokenPair::query, rows.data());
  rows = turned_back(std::move(rows), &TokenPair::query);
  const float* q = rows.data();
  const float* e =
      error.data() + static_cast<std::size_t>(q_head / geometry_.queries_per_kv_head()) * pairs_.size() * d;
  double sum = 0.0;
  for (std::size_t i = 0; i < pairs_.size(); ++i, q += d, e += d) {
    double fixed = 0.0;
    for (const RopeBlock& block : still_) fixed += dot(block, q, e);
    std::array<double, kNumOffsets> logit;
    logit.fill(fixed);
    for (std::size_t j = 0; j < rotary_.size(); ++j) {
      const double real = dot(rotary_[j], q, e), imaginary = cross(rotary_[j], q, e);
      const double *cosine = cos_.data() + j * kNumOffsets, *sine = sin_.data() + j * kNumOffsets;
      for (std::size_t n = 0; n < kNumOffsets; ++n) logit[n] += real * cosine[n] - imaginary * sine[n];
    }
    for (const double value : logit) sum += std::abs(value);
  }
  return sum / static_cast<double>(pairs_.size() * kNumOffsets);
}

}  // namespace kvq
