#include <kvq/compute/blas.h>
#include <kvq/compute/row_ops.h>
#include <kvq/compute/weight_change.h>
#include <kvq/eval/attention_block.h>

#include <algorithm>
#include <cmath>
#include <limits>

// Five products with all keys of a block are nearly all of the work: Q K^T and P V once, then for each scheme Q (K^ -
// K)^T, P (V^ - V) and (P^ - P) V^. The exact tokens of recent windows affect only a narrow band of columns, which is
// multiplied separately.

namespace kvq {

std::int64_t AttentionBlock::visible_begin(std::int64_t row) const {
  if (geometry_.sliding_window <= 0) return block_.begin - key_begin_;
  return std::max(block_.begin, block_.first + row + 1 - geometry_.sliding_window) - key_begin_;
}

std::int64_t AttentionBlock::visible_end(std::int64_t row) const { return block_.first + row + 1 - key_begin_; }

std::int64_t AttentionBlock::stored_end(const ExactTokens& exact, std::int64_t row) const {
  return std::clamp<std::int64_t>(block_.begin + exact.coded_end(position(row)) - key_begin_, 0, visible_end(row));
}

std::int64_t AttentionBlock::all_stored_end(const ExactTokens& exact) const {
  return exact.recent == 0 && exact.granule == 1 ? keys_ : stored_end(exact, 0);  // no query sees a key after its own
}

float AttentionBlock::sink() const {
  return geometry_.sink_logits.empty()
             ? -std::numeric_limits<float>::infinity()
             : static_cast<float>(geometry_.sink_logits[static_cast<std::size_t>(block_.q_head)]);
}

/// Columns of the `kTop` largest values of a row, the first of equal ones.
AttentionBlock::Places AttentionBlock::top_places(const float* row, std::int64_t count) const {
  constexpr std::int64_t kPiece = 64;
  Places places{};
  std::array<float, kTop> values;
  values.fill(-std::numeric_limits<float>::infinity());
  for (std::int64_t t = 0; t < count; t += kPiece) {
    const std::int64_t n = std::min(kPiece, count - t);
    if (!(row_ops::largest(row + t, n) > values.back())) continue;
    for (std::int64_t j = t; j < t + n; ++j) {
      if (!(row[j] > values.back())) continue;
      std::size_t at = kTop - 1;
      for (; at > 0 && row[j] > values[at - 1]; --at) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
      }
      values[at] = row[j];
      places[at] = j;
    }
  }
  std::sort(places.begin(), places.end());
  return places;
}

void AttentionBlock::look(const QueryBlock& block, std::span<const float> q, const ExactRows& rows) {
  block_ = block;
  q_ = q;
  const std::int64_t dim = geometry_.head_dim, window = geometry_.sliding_window;
  key_begin_ = window > 0 ? std::max(block.begin, block.first + 1 - window) : block.begin;
  keys_ = block.first + block.count - key_begin_;
  const auto size = static_cast<std::size_t>(block.count * keys_);
  const bool capped = geometry_.logit_softcap > 0.0;
  s_.resize(size);
  p_.resize(size);
  blas::gemm_nt(block.count, keys_, dim, static_cast<float>(geometry_.softmax_scale), q.data(), dim,
                rows.k.data() + key_begin_ * dim, dim, s_.data(), keys_);
  if (capped) uncapped_ = s_;
  top_.resize(static_cast<std::size_t>(block.count));
  sink_p_.resize(static_cast<std::size_t>(block.count));
  for (std::int64_t row = 0; row < block.count; ++row) {
    const std::int64_t from = visible_begin(row), to = visible_end(row);
    float* s = s_.data() + row * keys_;
    float* p = p_.data() + row * keys_;
    if (capped) row_ops::soft_cap(s + from, to - from, static_cast<float>(geometry_.logit_softcap));
    std::fill(p, p + from, 0.0f);
    std::copy(s + from, s + to, p + from);
    std::fill(p + to, p + keys_, 0.0f);
    const float top = std::max(sink(), row_ops::largest(p + from, to - from));
    const float of_sink = std::exp(sink() - top);
    const float factor = 1.0f / (row_ops::exponentiate(p + from, to - from, top) + of_sink);
    sink_p_[static_cast<std::size_t>(row)] = factor * of_sink;
    for (std::int64_t t = from; t < to; ++t) p[t] *= factor;
    if (to - from > static_cast<std::int64_t>(kTop))
      top_[static_cast<std::size_t>(row)] = top_places(s + from, to - from);
  }
  if (rows.v.empty()) return;
  o_.assign(static_cast<std::size_t>(block.count * geometry_.v_head_dim), 0.0f);
  weigh(p_, 0, keys_, rows.v.data(), o_);
}

/// out += columns [from, to) of the weights times the values of their tokens.
void AttentionBlock::weigh(const std::vector<float>& weights, std::int64_t from, std::int64_t to, const float* values,
                           std::vector<float>& out) const {
  if (from >= to) return;
  const std::int64_t v_dim = geometry_.v_head_dim;
  blas::gemm_nn(block_.count, v_dim, to - from, weights.data() + from, keys_, values + (key_begin_ + from) * v_dim,
                v_dim, true, out.data(), v_dim);
}

void AttentionBlock::compare(const ExactRows& rows, const StoredRows& stored, std::span<const float> curvature,
                             AttentionSums& sums, std::span<float> divergence) {
  sums.queries += static_cast<double>(block_.count);
  for (std::int64_t row = 0; row < block_.count; ++row) {
    const std::int64_t from = visible_begin(row), to = visible_end(row);
    sums.logit_energy += sum_of_squares(s_.data() + row * keys_ + from, to - from);
    if (to - from > static_cast<std::int64_t>(kTop)) sums.top_queries += 1.0;
    if (const std::int64_t context = context_of(row); context > 0) {
      sums.context.queries += 1.0;
      if (context > static_cast<std::int64_t>(kTop)) sums.context.top_queries += 1.0;
    }
  }
  if (stored.k_change.empty()) {
    std::fill(divergence.begin(), divergence.end(), 0.0f);
    sums.top_hits = static_cast<double>(kTop) * sums.top_queries;
    sums.context.top_hits = static_cast<double>(kTop) * sums.context.top_queries;
  } else {
    change_logits(stored, sums, divergence);
  }
  if (rows.v.empty()) return;
  change_outputs(rows, stored);
  const auto v_dim = static_cast<std::int64_t>(geometry_.v_head_dim);
  sums.output_energy += sum_of_squares(o_.data(), static_cast<std::int64_t>(o_.size()));
  sums.output_error += sum_of_squares(o_change_.data(), static_cast<std::int64_t>(o_change_.size()));
  sums.sv_error += sum_of_squares(sv_.data(), static_cast<std::int64_t>(sv_.size()));
  if (curvature.empty()) return;
  turned_.resize(o_change_.size());
  blas::gemm_nn(block_.count, v_dim, v_dim, o_change_.data(), v_dim, curvature.data(), v_dim, false, turned_.data(),
                v_dim);
  sums.curved_error += 0.5 * dot_product(o_change_.data(), turned_.data(), static_cast<std::int64_t>(turned_.size()));
}

std::int64_t AttentionBlock::context_of(std::int64_t row) const {
  if (!with_context_ || 2 * position(row) < block_.end - block_.begin) return 0;
  return visible_end(row) - 1 - visible_begin(row);
}

double AttentionBlock::kept_places(const float* logits, const float* change, std::int64_t count) {
  for (std::int64_t t = 0; t < count; ++t) shifted_[static_cast<std::size_t>(t)] = logits[t] + change[t];
  const Places exact = top_places(logits, count), changed = top_places(shifted_.data(), count);
  return static_cast<double>(std::count_if(changed.begin(), changed.end(), [&](std::int64_t place) {
    return std::binary_search(exact.begin(), exact.end(), place);
  }));
}

void AttentionBlock::compare_context(const float* logits, const float* change, std::int64_t count, ContextSums& sums) {
  if (count > static_cast<std::int64_t>(kTop)) sums.top_hits += kept_places(logits, change, count);
  // The weights are computed anew: a query that looks at its own key has no digits left for the others in p_.
  context_p_.assign(logits, logits + count);
  context_d_.assign(change, change + count);
  const float factor = 1.0f / row_ops::exponentiate(context_p_.data(), count, row_ops::largest(logits, count));
  for (float& p : context_p_) p *= factor;
  sums.divergence += change_weights(context_p_.data(), logits, context_d_.data(), count);
}

/// `delta` becomes the change of the capped logits c tanh(l / c) of logits l that change by `delta`: with a = l / c and
/// d = delta / c it is c (tanh(a + d) - tanh(a)) = c tanh(d) (1 - tanh(a) tanh(a + d)). The capped logits of look() do
/// not serve: a float near c has no digits left of 1 - tanh(a)^2.
void AttentionBlock::cap_change(const float* logits, float* delta, std::int64_t count, double cap) {
  for (std::int64_t t = 0; t < count; ++t) {
    const double a = logits[t] / cap, d = delta[t] / cap;
    delta[t] = static_cast<float>(cap * std::tanh(d) * (1.0 - std::tanh(a) * std::tanh(a + d)));
  }
}

/// The change of one row's weights, from that of its logits in d_; returns KL(p || p'). A learned sink is one more
/// weight of the row, whose logit never changes.
double AttentionBlock::change_row(std::int64_t row, std::int64_t from, std::int64_t to) {
  const std::int64_t start = row * keys_ + from, count = to - from;
  if (geometry_.sink_logits.empty())
    return change_weights(p_.data() + start, s_.data() + start, d_.data() + start, count);
  auto& [p, logits, delta] = with_sink_;
  p.assign(p_.data() + start, p_.data() + start + count);
  logits.assign(s_.data() + start, s_.data() + start + count);
  delta.assign(d_.data() + start, d_.data() + start + count);
  p.push_back(sink_p_[static_cast<std::size_t>(row)]);
  logits.push_back(sink());
  delta.push_back(0.0f);
  const double kl = change_weights(p.data(), logits.data(), delta.data(), count + 1);
  std::copy_n(delta.data(), count, d_.data() + start);
  return kl;
}

/// d_ becomes the change of the weights.
void AttentionBlock::change_logits(const StoredRows& stored, AttentionSums& sums, std::span<float> divergence) {
  const std::int64_t dim = geometry_.head_dim, last = stored_end(stored.k_exact, block_.count - 1);
  d_.resize(s_.size());
  if (last > 0)
    blas::gemm_nt(block_.count, last, dim, static_cast<float>(geometry_.softmax_scale), q_.data(), dim,
                  stored.k_change.data() + key_begin_ * dim, dim, d_.data(), keys_);
  shifted_.resize(static_cast<std::size_t>(keys_));
  for (std::int64_t row = 0; row < block_.count; ++row) {
    const std::int64_t from = visible_begin(row), to = visible_end(row),
                       end = std::max(from, stored_end(stored.k_exact, row));
    float* d = d_.data() + row * keys_;
    const float* s = s_.data() + row * keys_;
    std::fill(d, d + from, 0.0f);
    std::fill(d + end, d + keys_, 0.0f);
    if (geometry_.logit_softcap > 0.0)
      cap_change(uncapped_.data() + row * keys_ + from, d + from, end - from, geometry_.logit_softcap);
    sums.logit_error += sum_of_squares(d + from, end - from);
    if (to - from > static_cast<std::int64_t>(kTop)) {
      for (std::int64_t t = from; t < to; ++t) shifted_[static_cast<std::size_t>(t - from)] = s[t] + d[t];
      const Places changed = top_places(shifted_.data(), to - from);
      const Places& exact = top_[static_cast<std::size_t>(row)];
      for (const std::int64_t place : changed)
        sums.top_hits += std::binary_search(exact.begin(), exact.end(), place) ? 1.0 : 0.0;
    }
    if (const std::int64_t context = context_of(row); context > 0)
      compare_context(s + from, d + from, context, sums.context);
    const double kl = change_row(row, from, to);
    divergence[static_cast<std::size_t>(row)] = static_cast<float>(kl);
    sums.divergence += kl;
  }
}

/// Columns [from, to) of weights, zero where a query reads the exact token.
const std::vector<float>& AttentionBlock::masked(const std::vector<float>& weights, const ExactTokens& exact,
                                                 std::int64_t from, std::int64_t to) {
  band_.resize(weights.size());
  for (std::int64_t row = 0; row < block_.count; ++row) {
    const std::int64_t end = std::clamp(stored_end(exact, row), from, to);
    const float* w = weights.data() + row * keys_;
    float* out = band_.data() + row * keys_;
    std::copy(w + from, w + end, out + from);
    std::fill(out + end, out + to, 0.0f);
  }
  return band_;
}

void AttentionBlock::change_outputs(const ExactRows& rows, const StoredRows& stored) {
  const bool keys_change = !stored.k_change.empty(), values_change = !stored.v_change.empty();
  sv_.assign(o_.size(), 0.0f);
  const std::int64_t all = values_change ? all_stored_end(stored.v_exact) : 0;
  const std::int64_t some = values_change ? std::max(all, stored_end(stored.v_exact, block_.count - 1)) : 0;
  if (values_change) {
    weigh(p_, 0, all, stored.v_change.data(), sv_);
    if (some > all) weigh(masked(p_, stored.v_exact, all, some), all, some, stored.v_change.data(), sv_);
  }
  o_change_ = sv_;
  if (!keys_change) return;
  weigh(d_, 0, all, values_change ? stored.v.data() : rows.v.data(), o_change_);
  weigh(d_, all, keys_, rows.v.data(), o_change_);
  if (some > all) weigh(masked(d_, stored.v_exact, all, some), all, some, stored.v_change.data(), o_change_);
}

}  // namespace kvq
