#include <kvq/compute/attention_moment.h>
#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <bit>
#include <cmath>

// S is needed row by row only: o_i = S_i V is a row's whole contribution to C_S, so a panel of rows is enough at a time.
// A panel holds the same few tokens of all query heads of the group: they read the same keys, so one product with K serves
// them all. The two products with K and V are nearly all of the work; what lies between them (largest logit, exponential,
// sum, column energies) is one sweep over a panel that is still in the cache.

namespace kvq {

namespace {

constexpr std::int64_t kPanelRows = 128;       // rows of S in flight per thread
constexpr std::int64_t kPanelsPerTask = 16;    // fixed borders: partial sums are the same for any number of threads

// Cloned for wider vectors and chosen when the program starts; the same IEEE operations in every clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KVQ_WIDE __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define KVQ_WIDE
#endif

/// exp(x) for x <= 0, relative error below 2e-7; exactly 0 below -87. Written without a branch, so that it vectorises.
/// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2)/2, exp(r) by a polynomial of degree 6 (Taylor with the remainder
/// below 1e-8 on that range), n ln 2 subtracted in two pieces (Cody and Waite).
inline float exp_nonpositive(float x) {
  const float clamped = std::max(x, -87.0f);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are round(x / ln 2)
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const auto exponent = static_cast<std::uint32_t>(std::bit_cast<std::int32_t>(shifted) - 0x4b400000 + 127) << 23;
  const float result = p * std::bit_cast<float>(exponent);
  return x < -87.0f ? 0.0f : result;
}

/// The largest of a row, in 16 lanes: the compiler may not reorder a single chain of comparisons by itself.
inline float largest_of(const float* row, std::int64_t count) {
  float lanes[16];
  std::fill(lanes, lanes + 16, row[0]);
  std::int64_t t = 0;
  for (; t + 16 <= count; t += 16)
    for (int j = 0; j < 16; ++j) lanes[j] = lanes[j] < row[t + j] ? row[t + j] : lanes[j];
  for (; t < count; ++t) lanes[0] = std::max(lanes[0], row[t]);
  return *std::max_element(lanes, lanes + 16);
}

/// Exponentials of a row of logits in place; returns their sum, in double over 16 fixed lanes.
KVQ_WIDE double exponentiate(float* row, std::int64_t count) {
  const float largest = largest_of(row, count);
  double total = 0.0;
  std::int64_t t = 0;
  while (t < count) {
    // Partial sums of 16 lanes over at most 1024 entries: float32 is exact enough for 64 terms of one sign.
    float lanes[16] = {};
    const std::int64_t end = std::min(count, t + 1024);
    for (; t + 16 <= end; t += 16)
      for (int j = 0; j < 16; ++j) {
        const float e = exp_nonpositive(row[t + j] - largest);
        row[t + j] = e;
        lanes[j] += e;
      }
    for (; t < end; ++t) lanes[0] += row[t] = exp_nonpositive(row[t] - largest);
    for (const float lane : lanes) total += lane;
  }
  return total;
}

/// Squares a row of unnormalised weights in place and adds them, times `factor`, to the column sums.
KVQ_WIDE void square_and_add(float* row, std::int64_t count, float factor, float* columns) {
  for (std::int64_t t = 0; t < count; ++t) {
    row[t] = row[t] * row[t];
    columns[t] += factor * row[t];
  }
}
KVQ_WIDE void add_squares(const float* row, std::int64_t count, float factor, float* columns) {
  for (std::int64_t t = 0; t < count; ++t) columns[t] += factor * (row[t] * row[t]);
}

struct Partial {
  MomentSum outputs, scored_query;
  std::vector<double> columns;
};

/// Work space and steps of one thread's panels.
class Panel {
 public:
  Panel(const AttentionInput& in, bool scored_query, const std::vector<float>& v_norm)
      : in_(in), scored_query_(scored_query), v_norm_(v_norm), rows_per_token_(in.queries),
        tokens_(std::max<std::int64_t>(1, kPanelRows / in.queries)) {
    const auto rows = static_cast<std::size_t>(tokens_ * rows_per_token_);
    q_.resize(rows * static_cast<std::size_t>(in.dim));
    s_.resize(rows * static_cast<std::size_t>(std::min(in.tokens, key_capacity())));
    o_.resize(rows * static_cast<std::size_t>(in.v_dim));
    inverse_sum_.resize(rows);
    if (scored_query) {
      squared_o_.resize(o_.size());
      query_weight_.resize(rows);
    }
    columns_.resize(static_cast<std::size_t>(in.tokens));
  }
  std::int64_t tokens() const { return tokens_; }

  /// Tokens [first, first + count) of all query heads of the group.
  void run(std::int64_t first, std::int64_t count, Partial& into) {
    const std::int64_t key_begin = in_.window > 0 ? std::max<std::int64_t>(0, first - in_.window + 1) : 0;
    const std::int64_t keys = first + count - key_begin;
    const std::int64_t rows = count * rows_per_token_;
    gather_queries(first, count);
    blas::gemm_nt(rows, keys, in_.dim, static_cast<float>(in_.scale), q_.data(), in_.dim, in_.k + key_begin * in_.dim, in_.dim,
                  s_.data(), keys);
    softmax(first, count, key_begin, keys);
    blas::gemm_nn(rows, in_.v_dim, keys, s_.data(), keys, in_.v + key_begin * in_.v_dim, in_.v_dim, false, o_.data(), in_.v_dim);
    normalise(o_, rows, 1);
    into.outputs.add(std::span<const float>{o_.data(), static_cast<std::size_t>(rows * in_.v_dim)});
    std::fill_n(columns_.begin(), keys, 0.0f);
    if (scored_query_)
      score_queries(rows, key_begin, keys, into);
    else
      for (std::int64_t r = 0; r < rows; ++r) add_squares(s_.data() + r * keys, keys, square(r), columns_.data());
    for (std::int64_t t = 0; t < keys; ++t)
      into.columns[static_cast<std::size_t>(key_begin + t)] += columns_[static_cast<std::size_t>(t)];
  }

 private:
  std::int64_t key_capacity() const { return in_.window > 0 ? in_.window + tokens_ : in_.tokens; }
  float square(std::int64_t row) const {
    const float inverse = inverse_sum_[static_cast<std::size_t>(row)];
    return inverse * inverse;
  }

  /// Rows are ordered by token, then query head.
  void gather_queries(std::int64_t first, std::int64_t count) {
    for (std::int64_t t = 0; t < count; ++t)
      for (int g = 0; g < in_.queries; ++g)
        std::copy_n(in_.q + (g * in_.tokens + first + t) * in_.dim, in_.dim, q_.data() + (t * in_.queries + g) * in_.dim);
  }

  void softmax(std::int64_t first, std::int64_t count, std::int64_t key_begin, std::int64_t keys) {
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t last = first + t - key_begin;  // the query's own key
      const std::int64_t begin = in_.window > 0 ? std::max<std::int64_t>(0, last - in_.window + 1) : 0;
      for (int g = 0; g < in_.queries; ++g) {
        const std::int64_t r = t * in_.queries + g;
        float* row = s_.data() + r * keys;
        std::fill_n(row, begin, 0.0f);
        inverse_sum_[static_cast<std::size_t>(r)] = static_cast<float>(1.0 / exponentiate(row + begin, last + 1 - begin));
        std::fill(row + last + 1, row + keys, 0.0f);
      }
    }
  }

  void normalise(std::vector<float>& rows_of_dv, std::int64_t rows, int power) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float factor = power == 1 ? inverse_sum_[static_cast<std::size_t>(r)] : square(r);
      for (std::int64_t j = 0; j < in_.v_dim; ++j) rows_of_dv[static_cast<std::size_t>(r * in_.v_dim + j)] *= factor;
    }
  }

  /// w_i = scale^2 sum_t S_it^2 |v_t - o_i|^2, expanded: A - 2 B.o + C |o|^2 with A = sum S^2 |v|^2, B = sum S^2 v,
  /// C = sum S^2. The panel is squared in place; nobody reads it afterwards.
  void score_queries(std::int64_t rows, std::int64_t key_begin, std::int64_t keys, Partial& into) {
    for (std::int64_t r = 0; r < rows; ++r) square_and_add(s_.data() + r * keys, keys, square(r), columns_.data());
    blas::gemm_nn(rows, in_.v_dim, keys, s_.data(), keys, in_.v + key_begin * in_.v_dim, in_.v_dim, false, squared_o_.data(),
                  in_.v_dim);
    normalise(squared_o_, rows, 2);
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* s = s_.data() + r * keys;
      double a = 0.0, c = 0.0;
      for (std::int64_t t = 0; t < keys; ++t) {
        a += double{s[t]} * v_norm_[static_cast<std::size_t>(key_begin + t)];
        c += s[t];
      }
      double bo = 0.0, oo = 0.0;
      for (std::int64_t j = 0; j < in_.v_dim; ++j) {
        const double o = o_[static_cast<std::size_t>(r * in_.v_dim + j)];
        bo += squared_o_[static_cast<std::size_t>(r * in_.v_dim + j)] * o;
        oo += o * o;
      }
      const double inverse = square(r);
      const double w = in_.scale * in_.scale * (inverse * a - 2.0 * bo + inverse * c * oo);
      query_weight_[static_cast<std::size_t>(r)] = static_cast<float>(std::max(w, 0.0));
    }
    into.scored_query.add(std::span<const float>{q_.data(), static_cast<std::size_t>(rows * in_.dim)},
                          std::span<const float>{query_weight_.data(), static_cast<std::size_t>(rows)});
  }

  const AttentionInput& in_;
  bool scored_query_;
  const std::vector<float>& v_norm_;
  std::int64_t rows_per_token_, tokens_;
  std::vector<float> q_, s_, o_, squared_o_, inverse_sum_, query_weight_, columns_;
};

std::vector<float> squared_norms(const AttentionInput& in) {
  std::vector<float> norms(static_cast<std::size_t>(in.tokens));
  for (std::int64_t t = 0; t < in.tokens; ++t) {
    double sum = 0.0;
    for (std::int64_t j = 0; j < in.v_dim; ++j) sum += double{in.v[t * in.v_dim + j]} * in.v[t * in.v_dim + j];
    norms[static_cast<std::size_t>(t)] = static_cast<float>(sum);
  }
  return norms;
}

}  // namespace

void add_attention_moments(const AttentionInput& in, bool with_scored_query, AttentionMoments& into) {
  KVQ_ASSERT(in.queries >= 1 && in.tokens >= 1 && in.dim >= 1 && in.v_dim >= 1);
  const std::vector<float> v_norm = with_scored_query ? squared_norms(in) : std::vector<float>{};
  const std::int64_t panel_tokens = std::max<std::int64_t>(1, kPanelRows / in.queries);
  const std::int64_t task_tokens = panel_tokens * kPanelsPerTask;
  const std::int64_t tasks = (in.tokens + task_tokens - 1) / task_tokens;
  std::vector<Partial> partials(static_cast<std::size_t>(tasks));
  parallel_for(tasks, [&](std::int64_t index) {
    const std::int64_t task = tasks - 1 - index;  // the longest rows first: better balance at the end
    Partial& partial = partials[static_cast<std::size_t>(task)];
    partial = {MomentSum{in.v_dim}, MomentSum{with_scored_query ? in.dim : 0}, std::vector<double>(static_cast<std::size_t>(in.tokens))};
    Panel panel(in, with_scored_query, v_norm);
    const std::int64_t end = std::min(in.tokens, (task + 1) * task_tokens);
    for (std::int64_t first = task * task_tokens; first < end; first += panel_tokens)
      panel.run(first, std::min(panel_tokens, end - first), partial);
  });
  into.column_energy.assign(static_cast<std::size_t>(in.tokens), 0.0);
  for (const Partial& partial : partials) {
    into.outputs.add(partial.outputs);
    if (with_scored_query) into.scored_query.add(partial.scored_query);
    for (std::size_t t = 0; t < partial.columns.size(); ++t) into.column_energy[t] += partial.columns[t];
  }
}

}  // namespace kvq
