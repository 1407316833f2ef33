#include "support/naive_attention_error.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace kvq::test {

namespace {

static_assert(sizeof(AttentionSums) == kAttentionSums * sizeof(double), "a new sum needs a place here");
enum Sum {
  kQueries,
  kLogitError,
  kLogitEnergy,
  kSvError,
  kOutputError,
  kOutputEnergy,
  kCurvedError,
  kDivergence,
  kTopHits,
  kTopQueries,
  kContextQueries,
  kContextDivergence,
  kContextTopHits,
  kContextTopQueries
};

using Row = std::vector<double>;

/// Relative bound on the rounding of a product or an exponential: 8 units of 2^-24 of the largest terms.
constexpr double kUnit = 8.0 * 0x1p-24;

double dot(const Row& a, const Row& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }
double length(const Row& a) { return std::sqrt(dot(a, a)); }
double magnitude_dot(const Row& a, const Row& b) {
  double sum = 0.0;
  for (std::size_t c = 0; c < a.size(); ++c) sum += std::abs(a[c] * b[c]);
  return sum;
}
void add_scaled(double factor, const Row& x, Row& sum) {
  for (std::size_t c = 0; c < x.size(); ++c) sum[c] += factor * x[c];
}

std::vector<Row> rows_of(const std::vector<float>& numbers, int dim) {
  std::vector<Row> rows;
  for (auto at = numbers.begin(); at != numbers.end(); at += dim) rows.emplace_back(at, at + dim);
  return rows;
}

/// One side of one head's sequence.
struct SideRows {
  std::vector<Row> exact, stored, change;  ///< change = stored - exact
  Row no_change;
  ExactTokens tokens;
  bool is_stored(std::int64_t query, std::int64_t key) const {
    return key >= tokens.sink && key < tokens.coded_end(query);
  }
  const Row& read(std::int64_t query, std::int64_t key) const {
    return (is_stored(query, key) ? stored : exact)[static_cast<std::size_t>(key)];
  }
  const Row& changed(std::int64_t query, std::int64_t key) const {
    return is_stored(query, key) ? change[static_cast<std::size_t>(key)] : no_change;
  }
};

SideRows load(const ActivationTensor& tensor, const StoredSide* side, bool with_windows, int head, std::int64_t first,
              std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count * tensor.dim));
  tensor.load_head(head, first, count, numbers.data());
  SideRows rows;
  rows.exact = rows_of(numbers, tensor.dim);
  if (side != nullptr) side->restore(tensor, first, head, numbers);
  if (side != nullptr && with_windows) rows.tokens = side->exact_tokens();
  rows.stored = rows_of(numbers, tensor.dim);
  for (std::size_t t = 0; t < rows.exact.size(); ++t) {
    Row& change = rows.change.emplace_back(rows.stored[t]);
    for (std::size_t c = 0; c < change.size(); ++c) change[c] -= rows.exact[t][c];
  }
  rows.no_change.assign(static_cast<std::size_t>(tensor.dim), 0.0);
  return rows;
}

void add_row_errors(const SideRows& rows, double& error, double& energy) {
  const auto count = static_cast<std::int64_t>(rows.exact.size());
  for (std::int64_t t = 0; t < count; ++t) {
    const Row &exact = rows.exact[static_cast<std::size_t>(t)], &change = rows.changed(count - 1, t);
    energy += dot(exact, exact);
    error += dot(change, change);
  }
}

double log_sum_exp(const Row& logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const double l : logits) sum += std::exp(l - top);
  return top + std::log(sum);
}

/// Marks the ten largest logits; of two equal logits the earlier one. Logits have the order of the weights and never
/// underflow.
/// @param near  increased by the number of logits within `margin` of the tenth and the eleventh, if these two differ by
///              at most `margin`
std::vector<bool> top_ten(const Row& logits, double margin, double& near) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto before = [&](std::size_t a, std::size_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  std::partial_sort(order.begin(), order.begin() + 11, order.end(), before);
  std::vector<bool> chosen(logits.size(), false);
  for (std::size_t place = 0; place < 10; ++place) chosen[order[place]] = true;
  const double last = logits[order[9]], next = logits[order[10]];
  if (last - next <= margin)
    near += static_cast<double>(std::count_if(logits.begin(), logits.end(),
                                              [&](double l) { return l >= next - margin && l <= last + margin; }));
  return chosen;
}

/// The logits that a query has, exact and with stored keys, and their rounding.
struct Logits {
  Row exact, changed, delta;
  double logit_rounding = 0.0, delta_rounding = 0.0;
};

/// KL(p || p^) of the weights, which become `p`, with their changes.
NaiveNumber divergence_of(const Logits& logits, Row& p, Row& p_change) {
  // With r = log(p^ / p), KL = -sum p r = sum p (exp(r) - 1 - r), because p and p^ both sum to 1. No term of the last
  // sum is negative.
  const double log_z = log_sum_exp(logits.exact), log_z_changed = log_sum_exp(logits.changed);
  double divergence = 0.0, plain_divergence = 0.0, largest = 0.0;
  for (std::size_t a = 0; a < logits.exact.size(); ++a) {
    const double log_p = logits.exact[a] - log_z, r = logits.delta[a] - (log_z_changed - log_z);
    p.push_back(std::exp(log_p));
    p_change.push_back(r < 1.0 ? p[a] * std::expm1(r) : std::exp(log_p + r) - p[a]);
    divergence += p_change[a] - p[a] * r;
    plain_divergence += p[a] * (log_p - (logits.changed[a] - log_z_changed));
    largest = std::max({largest, std::abs(logits.exact[a]), std::abs(logits.changed[a])});
  }
  if (std::abs(divergence - plain_divergence) > 1e-13 * (1.0 + largest))
    throw std::logic_error("the naive attention contradicts itself");
  // d KL = sum (p^ - p) d delta, where sum |p^ - p| <= sqrt(2 KL), and = sum (p^ - p (1 + log(p^ / p)) - p KL) d l,
  // where the first part is positive and its sum is KL.
  return {divergence, std::sqrt(2.0 * std::max(0.0, divergence)) * logits.delta_rounding +
                          logits.delta_rounding * logits.delta_rounding +
                          2.0 * divergence * (logits.logit_rounding + kUnit) + 1e-18};
}

/// How many of the ten largest stay. @param near  see top_ten()
double top_hits(const Logits& logits, double& near) {
  const std::vector<bool> best = top_ten(logits.exact, 2.0 * logits.logit_rounding, near),
                          found = top_ten(logits.changed, 2.0 * (logits.logit_rounding + logits.delta_rounding), near);
  double hits = 0.0;
  for (std::size_t a = 0; a < best.size(); ++a) hits += best[a] && found[a] ? 1.0 : 0.0;
  return hits;
}

class NaiveMeter {
 public:
  NaiveMeter(const LayerActivations& layer, const StoredLayer& stored, bool with_windows)
      : layer_(layer), g_(layer.geometry), stored_(stored), with_windows_(with_windows) {}

  NaiveErrors measure() {
    const std::size_t width = static_cast<std::size_t>(g_.num_q_heads) * v_dim();
    output_.assign(tokens(), Row(width, 0.0));
    change_ = output_;
    output_bound_.assign(tokens(), Row(static_cast<std::size_t>(g_.num_q_heads), 0.0));
    change_bound_ = output_bound_;
    for (int head = 0; head < g_.num_kv_heads; ++head) {
      NaiveHead& result = result_.heads.emplace_back();
      result.divergence.resize(static_cast<std::size_t>(g_.queries_per_kv_head()) * tokens());
      for (std::size_t s = 0; s + 1 < layer_.cu_seqlens.size(); ++s)
        add_sequence(layer_.cu_seqlens[s], layer_.cu_seqlens[s + 1] - layer_.cu_seqlens[s], head, result);
      for (auto& bucket : result.buckets)
        for (NaiveNumber& sum : bucket) sum.bound = std::sqrt(sum.bound);
    }
    if (!layer_.o_proj.empty() && layer_.v) {
      project(output_, output_bound_, result_.projected_energy);
      project(change_, change_bound_, result_.projected_error);
    }
    return std::move(result_);
  }

 private:
  std::size_t tokens() const { return static_cast<std::size_t>(layer_.k.tokens); }
  std::size_t v_dim() const { return static_cast<std::size_t>(g_.v_head_dim); }

  void add_sequence(std::int64_t first, std::int64_t count, int head, NaiveHead& result) {
    const SideRows k = load(layer_.k, stored_.k.get(), with_windows_, head, first, count);
    add_row_errors(k, result.k_error, result.k_energy);
    SideRows v;
    if (layer_.v) {
      v = load(*layer_.v, stored_.v.get(), with_windows_, head, first, count);
      add_row_errors(v, result.v_error, result.v_energy);
    }
    std::vector<float> numbers(static_cast<std::size_t>(count * g_.head_dim));
    for (int group = 0; group < g_.queries_per_kv_head(); ++group) {
      const int q_head = head * g_.queries_per_kv_head() + group;
      layer_.q.load_head(q_head, first, count, numbers.data());
      const std::vector<Row> q = rows_of(numbers, g_.head_dim);
      for (std::int64_t i = 0; i < count; ++i) {
        const auto token = static_cast<std::size_t>(first + i);
        auto& bucket = bucket_of(i, result);
        result.divergence[static_cast<std::size_t>(group) * tokens() + token] =
            add_query(q[static_cast<std::size_t>(i)], i, count, token, q_head, k, v, bucket);
      }
    }
  }

  static std::array<NaiveNumber, kAttentionSums>& bucket_of(std::int64_t context, NaiveHead& result) {
    std::size_t bucket = 0;
    for (std::int64_t edge = 64; edge <= context; edge *= 4) ++bucket;
    if (result.buckets.size() <= bucket) result.buckets.resize(bucket + 1);
    return result.buckets[bucket];
  }

  /// Adds a value. Rounding errors of different queries are independent, so the bounds are added as squares.
  static void add(NaiveNumber& sum, double value, double bound) {
    sum.value += value;
    sum.bound += bound * bound;
  }

  /// Block-GTQ B.4: the query's own key, the last, is left out.
  static void add_context(Logits logits, std::array<NaiveNumber, kAttentionSums>& sums) {
    for (Row* row : {&logits.exact, &logits.changed, &logits.delta}) row->pop_back();
    if (logits.exact.empty()) return;
    Row p, p_change;
    const NaiveNumber divergence = divergence_of(logits, p, p_change);
    add(sums[kContextQueries], 1.0, 0.0);
    add(sums[kContextDivergence], divergence.value, divergence.bound);
    if (logits.exact.size() <= 10) return;
    double near = 0.0;
    const double hits = top_hits(logits, near);
    add(sums[kContextTopQueries], 1.0, 0.0);
    add(sums[kContextTopHits], hits, near);
  }

  double capped(double logit) const {
    return g_.logit_softcap > 0.0 ? g_.logit_softcap * std::tanh(logit / g_.logit_softcap) : logit;
  }

  /// @param count  tokens of the sequence
  NaiveNumber add_query(const Row& q, std::int64_t i, std::int64_t count, std::size_t token, int q_head,
                        const SideRows& k, const SideRows& v, std::array<NaiveNumber, kAttentionSums>& sums) {
    const std::int64_t begin = g_.sliding_window == 0 ? 0 : std::max<std::int64_t>(0, i - g_.sliding_window + 1);
    Row exact, changed, delta;
    double logit_size = 0.0, delta_size = 0.0;  // sizes of the terms of a product; the terms round
    double moved_size = 0.0;                    // size by which a rounded logit moves the change of its capped value
    for (std::int64_t j = begin; j <= i; ++j) {
      const Row &key = k.exact[static_cast<std::size_t>(j)], &change = k.changed(i, j);
      exact.push_back(capped(g_.softmax_scale * dot(q, key)));
      changed.push_back(capped(g_.softmax_scale * dot(q, k.read(i, j))));
      delta.push_back(g_.logit_softcap > 0.0 ? changed.back() - exact.back() : g_.softmax_scale * dot(q, change));
      const double size = g_.softmax_scale * magnitude_dot(q, key);
      logit_size = std::max(logit_size, size);
      // With D = c (tanh(b) - tanh(a)): dD / d(c b) = 1 - tanh(b)^2 <= 1 at a fixed a, and at a fixed b - a,
      // dD / d(c a) = tanh(a)^2 - tanh(b)^2, whose size is at most 2 |D| / c and at most 1.
      if (g_.logit_softcap > 0.0)
        moved_size = std::max(moved_size, std::min(1.0, 2.0 * std::abs(delta.back()) / g_.logit_softcap) * size);
      delta_size = std::max(delta_size, g_.softmax_scale * magnitude_dot(q, change));
    }
    const double logit_rounding = kUnit * (logit_size + 1.0 + g_.logit_softcap),
                 delta_rounding = kUnit * (delta_size + moved_size);
    add(sums[kQueries], 1.0, 0.0);
    add(sums[kLogitError], dot(delta, delta), 2.0 * delta_rounding * length(delta) + delta_rounding * delta_rounding);
    add(sums[kLogitEnergy], dot(exact, exact), 2.0 * logit_rounding * length(exact));

    const Logits of_keys{exact, changed, delta, logit_rounding, delta_rounding};
    const std::size_t keys = exact.size();
    Logits logits = of_keys;
    if (!g_.sink_logits.empty()) {  // a learned sink is one more logit, which does not change and has no value
      for (Row* row : {&logits.exact, &logits.changed})
        row->push_back(g_.sink_logits[static_cast<std::size_t>(q_head)]);
      logits.delta.push_back(0.0);
    }
    Row p, p_change;
    const NaiveNumber divergence = divergence_of(logits, p, p_change);
    add(sums[kDivergence], divergence.value, divergence.bound);
    for (Row* row : {&p, &p_change}) row->resize(keys);
    if (exact.size() > 10) {
      double near = 0.0;
      const double hits = top_hits(of_keys, near);
      add(sums[kTopQueries], 1.0, 0.0);
      add(sums[kTopHits], hits, near);
    }
    if (2 * i >= count) add_context(of_keys, sums);
    if (layer_.v) add_outputs(i, begin, token, q_head, v, p, p_change, logit_rounding, delta_rounding, sums);
    return divergence;
  }

  void add_outputs(std::int64_t i, std::int64_t begin, std::size_t token, int q_head, const SideRows& v, const Row& p,
                   const Row& p_change, double logit_rounding, double delta_rounding,
                   std::array<NaiveNumber, kAttentionSums>& sums) {
    Row o(v_dim(), 0.0), sv(v_dim(), 0.0), o_change(v_dim(), 0.0);
    double o_rounding = 0.0, sv_rounding = 0.0, change_rounding = 0.0;
    for (std::size_t a = 0; a < p.size(); ++a) {
      const std::int64_t j = begin + static_cast<std::int64_t>(a);
      const Row &exact = v.exact[static_cast<std::size_t>(j)], &read = v.read(i, j), &change = v.changed(i, j);
      add_scaled(p[a], exact, o);
      add_scaled(p[a], change, sv);
      add_scaled(p_change[a], read, o_change);
      o_rounding += logit_rounding * p[a] * length(exact);
      sv_rounding += logit_rounding * p[a] * length(change);
      change_rounding +=
          (delta_rounding * (p[a] + p_change[a]) + logit_rounding * std::abs(p_change[a])) * length(read);
    }
    add_scaled(1.0, sv, o_change);
    change_rounding += sv_rounding;
    add(sums[kSvError], dot(sv, sv), (2.0 * length(sv) + sv_rounding) * sv_rounding);
    add(sums[kOutputError], dot(o_change, o_change), (2.0 * length(o_change) + change_rounding) * change_rounding);
    add(sums[kOutputEnergy], dot(o, o), (2.0 * length(o) + o_rounding) * o_rounding);
    const auto head = static_cast<std::size_t>(q_head);
    if (!layer_.output_curvature.empty()) {
      Row turned;
      for (std::size_t c = 0; c < v_dim(); ++c) {
        const auto row = layer_.output_curvature.begin() + static_cast<std::ptrdiff_t>((head * v_dim() + c) * v_dim());
        turned.push_back(std::inner_product(o_change.begin(), o_change.end(), row, 0.0));
      }
      add(sums[kCurvedError], 0.5 * dot(o_change, turned),
          (length(turned) + kUnit * length(o_change)) * change_rounding);
    }
    std::copy(o.begin(), o.end(), output_[token].begin() + static_cast<std::ptrdiff_t>(head * v_dim()));
    std::copy(o_change.begin(), o_change.end(), change_[token].begin() + static_cast<std::ptrdiff_t>(head * v_dim()));
    output_bound_[token][head] = o_rounding;
    change_bound_[token][head] = change_rounding;
  }

  /// Sum over tokens of |W_o x|^2.
  void project(const std::vector<Row>& x, const std::vector<Row>& bounds, NaiveNumber& sum) const {
    const std::size_t width = static_cast<std::size_t>(g_.num_q_heads) * v_dim();
    const std::vector<Row> projection = rows_of(layer_.o_proj, static_cast<int>(width));
    double largest = 0.0;  // entry of W_o
    for (const Row& row : projection)
      for (const double value : row) largest = std::max(largest, std::abs(value));
    const double gain =
        largest * std::sqrt(static_cast<double>(projection.size() * v_dim()));  // a bound for |W_o x| / |x| of one head
    for (std::size_t t = 0; t < x.size(); ++t) {
      double energy = 0.0;
      for (const Row& row : projection) energy += dot(row, x[t]) * dot(row, x[t]);
      add(sum, energy, 2.0 * std::sqrt(energy) * gain * length(bounds[t]));
    }
    sum.bound = std::sqrt(sum.bound);
  }

  const LayerActivations& layer_;
  const LayerGeometry& g_;
  const StoredLayer& stored_;
  bool with_windows_;
  NaiveErrors result_;
  std::vector<Row> output_, change_;              ///< [T][Hq Dv]
  std::vector<Row> output_bound_, change_bound_;  ///< [T][Hq], for the length of one head's part
};

}  // namespace

const std::array<const char*, kAttentionSums> kAttentionSumNames = {
    "queries",         "logit_error",        "logit_energy",     "sv_error",           "output_error",
    "output_energy",   "curved_error",       "divergence",       "top_hits",           "top_queries",
    "context.queries", "context.divergence", "context.top_hits", "context.top_queries"};

std::array<double, kAttentionSums> numbers_of(const AttentionSums& s) {
  return {s.queries,         s.logit_error,        s.logit_energy,     s.sv_error,           s.output_error,
          s.output_energy,   s.curved_error,       s.divergence,       s.top_hits,           s.top_queries,
          s.context.queries, s.context.divergence, s.context.top_hits, s.context.top_queries};
}

NaiveErrors naive_attention_errors(const LayerActivations& layer, const StoredLayer& stored, bool with_windows) {
  return NaiveMeter(layer, stored, with_windows).measure();
}

std::string first_disagreement(const LayerError& found, const NaiveErrors& naive) {
  std::string text;
  const auto compare = [&](double number, const NaiveNumber& expected, double relative, const std::string& what) {
    const double difference = std::abs(number - expected.value);
    if (!text.empty() || difference <= relative * std::abs(expected.value) + expected.bound) return;
    text = fmt::format("{}: found {}, expected {} with a bound of {} on rounding, relative difference {}", what, number,
                       expected.value, expected.bound, difference / std::abs(expected.value));
  };
  constexpr double kRelative = 1e-6;
  if (found.heads.size() != naive.heads.size())
    return fmt::format("{} heads, expected {}", found.heads.size(), naive.heads.size());
  compare(found.projected_error, naive.projected_error, kRelative, "projected_error");
  compare(found.projected_energy, naive.projected_energy, kRelative, "projected_energy");
  for (std::size_t h = 0; h < found.heads.size(); ++h) {
    const HeadError& head = found.heads[h];
    const NaiveHead& want = naive.heads[h];
    compare(head.k_error, {want.k_error, 0.0}, kRelative, fmt::format("head {}: k_error", h));
    compare(head.k_energy, {want.k_energy, 0.0}, kRelative, fmt::format("head {}: k_energy", h));
    compare(head.v_error, {want.v_error, 0.0}, kRelative, fmt::format("head {}: v_error", h));
    compare(head.v_energy, {want.v_energy, 0.0}, kRelative, fmt::format("head {}: v_energy", h));
    if (head.buckets.size() < want.buckets.size()) return fmt::format("head {}: {} buckets", h, head.buckets.size());
    for (std::size_t b = 0; b < head.buckets.size(); ++b) {
      const auto sums = numbers_of(head.buckets[b]);
      const auto expected = b < want.buckets.size() ? want.buckets[b] : std::array<NaiveNumber, kAttentionSums>{};
      for (std::size_t i = 0; i < kAttentionSums; ++i) {
        const bool is_count = i == kQueries || i == kTopHits || i == kTopQueries || i == kContextQueries ||
                              i == kContextTopHits || i == kContextTopQueries;
        compare(sums[i], expected[i], is_count ? 0.0 : kRelative,
                fmt::format("head {}, bucket {}: {}", h, b, kAttentionSumNames[i]));
      }
    }
    if (head.divergence.size() != want.divergence.size())
      return fmt::format("head {}: divergence of {} queries, expected {}", h, head.divergence.size(),
                         want.divergence.size());
    for (std::size_t t = 0; t < head.divergence.size(); ++t)
      compare(double{head.divergence[t]}, want.divergence[t], kRelative,
              fmt::format("head {}: divergence of query {}", h, t));
  }
  return text;
}

}  // namespace kvq::test
