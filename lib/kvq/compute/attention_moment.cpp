#include <kvq/compute/attention_moment.h>
#include <kvq/compute/blas.h>
#include <kvq/compute/parallel.h>
#include <kvq/compute/row_ops.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

// S is needed row by row only: o_i = S_i V is a row's whole contribution to C_S, so a panel of rows is enough at a
// time. A panel holds the same few tokens of all query heads of the group: they read the same keys, so one product with
// K serves them all. Inside a panel the keys come in blocks that stay in the second-level cache: logits, exponentials
// against the row's largest logit so far, and O += S_b V_b follow each other on one block before the next is touched.
// The two products are nearly all of the work. Column energies need the finished row sums, so the panel is kept and
// swept once more.

namespace kvq {

namespace {

constexpr std::int64_t kPanelRows = 256;          // rows of S in flight per thread, fewer for very long sequences
constexpr std::int64_t kPanelElements = 8 << 20;  // 32 MB, unless 32 rows need more
constexpr std::int64_t kBlockKeys = 1024;
constexpr std::int64_t kPanelsPerTask = 8;  // fixed borders: partial sums are the same for any number of threads

struct Partial {
  MomentSum outputs, scored_query;
  std::vector<double> columns;
};

std::int64_t panel_tokens(const AttentionInput& in) {
  const std::int64_t keys = in.window > 0 ? std::min<std::int64_t>(in.tokens, in.window) : in.tokens;
  const std::int64_t rows = std::clamp<std::int64_t>(kPanelElements / keys, 32, kPanelRows);
  return std::max<std::int64_t>(1, rows / in.queries);
}

/// Work space and steps of one thread's panels.
class Panel {
 public:
  Panel(const AttentionInput& in, bool scored_query, const std::vector<float>& v_norm)
      : in_(in), scored_query_(scored_query), v_norm_(v_norm), tokens_(panel_tokens(in)) {
    const auto rows = static_cast<std::size_t>(tokens_ * in.queries);
    const std::int64_t keys = std::min(in.tokens, in.window > 0 ? in.window + tokens_ : in.tokens);
    q_.resize(rows * static_cast<std::size_t>(in.dim));
    s_ = std::make_unique_for_overwrite<float[]>(
        rows * static_cast<std::size_t>(keys));  // clearing it would cost 5% of the run time
    o_.resize(rows * static_cast<std::size_t>(in.v_dim));
    block_largest_.resize(rows * static_cast<std::size_t>((keys + kBlockKeys - 1) / kBlockKeys));
    columns_.resize(static_cast<std::size_t>(keys));
    if (scored_query) squared_o_.resize(o_.size());
  }

  /// Tokens [first, first + count) of all query heads of the group.
  void run(std::int64_t first, std::int64_t count, Partial& into) {
    if (in_.counts != nullptr && std::none_of(in_.counts + first, in_.counts + first + count, is_set)) return;
    first_ = first;
    rows_ = count * in_.queries;
    key_begin_ = in_.window > 0 ? std::max<std::int64_t>(0, first - in_.window + 1) : 0;
    keys_ = first + count - key_begin_;
    gather_queries(count);
    attend();
    into.outputs.add(std::span<const float>{o_.data(), static_cast<std::size_t>(rows_ * in_.v_dim)},
                     counting_weights());
    add_column_energies(into);
    if (scored_query_) score_queries(into);
  }

 private:
  static bool is_set(std::uint8_t flag) { return flag != 0; }
  bool counts(std::int64_t row) const {
    return in_.counts == nullptr || is_set(in_.counts[first_ + row / in_.queries]);
  }
  /// [rows] 1 for the queries that count, else 0; empty if all count.
  std::vector<float> counting_weights() const {
    if (in_.counts == nullptr) return {};
    std::vector<float> weights(static_cast<std::size_t>(rows_));
    for (std::int64_t r = 0; r < rows_; ++r) weights[static_cast<std::size_t>(r)] = counts(r) ? 1.0f : 0.0f;
    return weights;
  }
  std::int64_t num_blocks() const { return (keys_ + kBlockKeys - 1) / kBlockKeys; }
  std::int64_t block_size(std::int64_t b) const { return std::min(kBlockKeys, keys_ - b * kBlockKeys); }
  /// Block b of the panel, [rows, block_size(b)].
  float* block(std::int64_t b) { return s_.get() + b * kBlockKeys * rows_; }
  const float* values(std::int64_t b) const { return in_.v + (key_begin_ + b * kBlockKeys) * in_.v_dim; }

  /// Rows are ordered by token, then query head.
  void gather_queries(std::int64_t count) {
    for (std::int64_t t = 0; t < count; ++t)
      for (int g = 0; g < in_.queries; ++g)
        std::copy_n(in_.q + (g * in_.tokens + first_ + t) * in_.dim, in_.dim,
                    q_.data() + (t * in_.queries + g) * in_.dim);
  }

  /// Unnormalized S block by block, then O = S V and the row sums.
  void attend() {
    begin_rows();
    std::fill(o_.begin(), o_.end(), 0.0f);
    for (std::int64_t b = 0; b < num_blocks(); ++b) {
      const std::int64_t n = block_size(b);
      blas::gemm_nt(rows_, n, in_.dim, static_cast<float>(in_.scale), q_.data(), in_.dim,
                    in_.k + (key_begin_ + b * kBlockKeys) * in_.dim, in_.dim, block(b), n);
      for (std::int64_t r = 0; r < rows_; ++r) soften_row(b, r, n);
      blas::gemm_nn(rows_, in_.v_dim, n, block(b), n, values(b), in_.v_dim, true, o_.data(), in_.v_dim);
    }
    for (std::int64_t r = 0; r < rows_; ++r)
      scale_output(r, static_cast<float>(1.0 / sum_[static_cast<std::size_t>(r)]));
  }

  /// A learned sink enters as a key that was seen before all others and has no value.
  void begin_rows() {
    largest_.assign(static_cast<std::size_t>(rows_), -HUGE_VALF);
    sum_.assign(static_cast<std::size_t>(rows_), in_.sinks.empty() ? 0.0 : 1.0);
    if (in_.sinks.empty()) return;
    for (std::int64_t r = 0; r < rows_; ++r)
      largest_[static_cast<std::size_t>(r)] = static_cast<float>(in_.sinks[static_cast<std::size_t>(r % in_.queries)]);
  }

  /// Exponentials of one row of block b, zeros where the mask forbids; rescales the row's output to a new largest
  /// logit.
  void soften_row(std::int64_t b, std::int64_t r, std::int64_t n) {
    const std::int64_t own =
        first_ + r / in_.queries - key_begin_ - b * kBlockKeys;  // the query's own key, in this block's count
    const std::int64_t end = std::clamp<std::int64_t>(own + 1, 0, n);
    const std::int64_t begin = in_.window > 0 ? std::clamp<std::int64_t>(own - in_.window + 1, 0, end) : 0;
    float* row = block(b) + r * n;
    float& largest = largest_[static_cast<std::size_t>(r)];
    double& sum = sum_[static_cast<std::size_t>(r)];
    if (begin < end) {
      if (in_.cap > 0.0) row_ops::soft_cap(row + begin, end - begin, static_cast<float>(in_.cap));
      const float now = std::max(largest, row_ops::largest(row + begin, end - begin));
      if (now > largest && largest > -HUGE_VALF) {
        const float factor = std::exp(largest - now);
        sum *= factor;
        scale_output(r, factor);
      }
      largest = now;
      sum += row_ops::exponentiate(row + begin, end - begin, now);
    }
    block_largest_[static_cast<std::size_t>(b * rows_ + r)] = largest;
    std::fill(row, row + begin, 0.0f);
    std::fill(row + end, row + n, 0.0f);
  }

  void scale_output(std::int64_t r, float factor) {
    float* o = o_.data() + r * in_.v_dim;
    for (std::int64_t j = 0; j < in_.v_dim; ++j) o[j] *= factor;
  }

  /// What turns row r of block b into S: exp(block's largest - row's largest) / row sum.
  float normalization(std::int64_t b, std::int64_t r) const {
    const auto row = static_cast<std::size_t>(r);
    return static_cast<float>(
        std::exp(double{block_largest_[static_cast<std::size_t>(b * rows_ + r)]} - largest_[row]) / sum_[row]);
  }

  void add_column_energies(Partial& into) {
    std::fill(columns_.begin(), columns_.end(), 0.0f);
    for (std::int64_t b = 0; b < num_blocks(); ++b)
      for (std::int64_t r = 0; r < rows_; ++r)
        if (counts(r))
          row_ops::add_squares(block(b) + r * block_size(b), block_size(b), normalization(b, r),
                               columns_.data() + b * kBlockKeys);
    for (std::int64_t t = 0; t < keys_; ++t)
      into.columns[static_cast<std::size_t>(key_begin_ + t)] += columns_[static_cast<std::size_t>(t)];
  }

  /// Multiplies unnormalized weights exp(logit - top) by the slope of the cap at their logits.
  void apply_slopes(float* row, std::int64_t count, float top) const {
    const auto cap = static_cast<float>(in_.cap);
    for (std::int64_t t = 0; t < count; ++t) {
      if (!(row[t] > 0.0f)) continue;
      const float part = (std::log(row[t]) + top) / cap;
      row[t] *= std::max(0.0f, 1.0f - part * part);
    }
  }

  /// w_i = scale^2 sum_t S_it^2 |v_t - o_i|^2, expanded: A - 2 B.o + C |o|^2 with A = sum S^2 |v|^2, B = sum S^2 v, C =
  /// sum S^2; with a cap, S times its slope takes the place of S. No later step reads S, so the panel is squared in
  /// place.
  void score_queries(Partial& into) {
    std::fill(squared_o_.begin(), squared_o_.end(), 0.0f);
    for (std::int64_t b = 0; b < num_blocks(); ++b)
      for (std::int64_t r = 0; r < rows_; ++r) {
        const float factor = normalization(b, r);
        float* row = block(b) + r * block_size(b);
        if (in_.cap > 0.0) apply_slopes(row, block_size(b), block_largest_[static_cast<std::size_t>(b * rows_ + r)]);
        for (std::int64_t t = 0; t < block_size(b); ++t) row[t] = (factor * row[t]) * (factor * row[t]);
      }
    for (std::int64_t b = 0; b < num_blocks(); ++b)
      blas::gemm_nn(rows_, in_.v_dim, block_size(b), block(b), block_size(b), values(b), in_.v_dim, true,
                    squared_o_.data(), in_.v_dim);
    std::vector<float> weights(static_cast<std::size_t>(rows_));
    for (std::int64_t r = 0; r < rows_; ++r) {
      if (!counts(r)) continue;
      double a = 0.0, c = 0.0, bo = 0.0, oo = 0.0;
      for (std::int64_t t = 0; t < keys_; ++t) {
        const std::int64_t b = t / kBlockKeys;
        const double s = block(b)[r * block_size(b) + t % kBlockKeys];
        a += s * v_norm_[static_cast<std::size_t>(key_begin_ + t)];
        c += s;
      }
      for (std::int64_t j = r * in_.v_dim; j < (r + 1) * in_.v_dim; ++j) {
        const double o = o_[static_cast<std::size_t>(j)];
        bo += squared_o_[static_cast<std::size_t>(j)] * o;
        oo += o * o;
      }
      weights[static_cast<std::size_t>(r)] =
          static_cast<float>(std::max(in_.scale * in_.scale * (a - 2.0 * bo + c * oo), 0.0));
    }
    into.scored_query.add(std::span<const float>{q_.data(), static_cast<std::size_t>(rows_ * in_.dim)}, weights);
  }

  const AttentionInput& in_;
  bool scored_query_;
  const std::vector<float>& v_norm_;
  std::int64_t tokens_;
  std::int64_t first_ = 0, rows_ = 0, key_begin_ = 0, keys_ = 0;  // of the panel at work
  std::unique_ptr<float[]> s_;
  std::vector<float> q_, o_, squared_o_, block_largest_, largest_, columns_;
  std::vector<double> sum_;
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
  const std::int64_t step = panel_tokens(in);
  const std::int64_t task_tokens = step * kPanelsPerTask;
  const std::int64_t tasks = (in.tokens + task_tokens - 1) / task_tokens;
  std::vector<Partial> partials(static_cast<std::size_t>(tasks));
  parallel_for(tasks, [&](std::int64_t index) {
    const std::int64_t task = tasks - 1 - index;  // the longest rows first: better balance at the end
    Partial& partial = partials[static_cast<std::size_t>(task)];
    partial = {MomentSum{in.v_dim}, MomentSum{with_scored_query ? in.dim : 0},
               std::vector<double>(static_cast<std::size_t>(in.tokens))};
    Panel panel(in, with_scored_query, v_norm);
    const std::int64_t end = std::min(in.tokens, (task + 1) * task_tokens);
    for (std::int64_t first = task * task_tokens; first < end; first += step)
      panel.run(first, std::min(step, end - first), partial);
  });
  into.column_energy.assign(static_cast<std::size_t>(in.tokens), 0.0);
  for (const Partial& partial : partials) {
    into.outputs.add(partial.outputs);
    if (with_scored_query) into.scored_query.add(partial.scored_query);
    for (std::size_t t = 0; t < partial.columns.size(); ++t) into.column_energy[t] += partial.columns[t];
  }
}

}  // namespace kvq
