#include <kvq/core/definite.h>
#include <kvq/core/error.h>
#include <kvq/stats/stats_check.h>
#include <kvq/stats/token_ranges.h>

#include <algorithm>
#include <cmath>
#include <span>

namespace kvq {

namespace {

/// Of the largest diagonal element: sums of attention are float32 inside, and held-out tokens are subtracted from them.
constexpr double kNegative = 1e-5;
constexpr double kAsymmetry = 1e-9;

/// The checks of one layer.
class LayerCheck {
 public:
  LayerCheck(const LayerStats& stats, const StatsPromise& promise, const std::string& file)
      : stats_(stats), promise_(promise), file_(file) {}

  void run() const {
    check_counts();
    check_weights();
    for (const auto& [moment, sums] : stats_.moments)
      for (std::size_t head = 0; head < sums.size(); ++head) check_moment(moment, sums[head], head);
    check_matrices("o_proj_metric", stats_.o_proj_metric);
    if (stats_.held_out)
      check_matrices("held_out.curvature", {stats_.held_out->curvature.begin(), stats_.held_out->curvature.end()});
    if (stats_.held_out) check_place("held_out.token", stats_.held_out->token, stats_.held_out->count());
    check_sample();
    if (stats_.golden) check_place("golden.token", stats_.golden->first, stats_.golden->count);
  }

 private:
  [[noreturn]] void reject(const std::string& what) const {
    throw Error{ErrorKind::bad_input, fmt::format("{}: layer {}: {}", file_, stats_.layer, what),
                "the file was changed or damaged: collect again"};
  }

  std::int64_t held_out_tokens() const { return stats_.held_out ? stats_.held_out->count() : 0; }

  void check_counts() const {
    if (stats_.sequences > stats_.tokens)
      reject(fmt::format("expected at most as many sequences as tokens {}, found {}", stats_.tokens, stats_.sequences));
    if (held_out_tokens() >= stats_.tokens)
      reject(fmt::format("held_out_tokens: expected fewer than the {} tokens, found {}", stats_.tokens,
                         held_out_tokens()));
    if (stats_.ranges.empty()) return;  // of a version before 1.5
    if (const std::int64_t found = total_tokens(stats_.ranges); found != stats_.tokens)
      reject(fmt::format("ranges: expected {} tokens, found {}", stats_.tokens, found));
    if (overlaps_itself(stats_.ranges)) reject("ranges: expected no token twice");
  }

  /// The moment's weight of one token.
  double unit(Moment moment) const {
    return moment == Moment::key || moment == Moment::value ? 1.0 : stats_.geometry.queries_per_kv_head();
  }

  /// Merged files may have dropped sets of held-out tokens, so with such tokens the number in the sums is only bounded.
  void check_weights() const {
    double rows = 0.0, query_rows = 0.0;  // tokens in the sums
    for (const auto& [moment, sums] : stats_.moments) {
      if (moment == Moment::sst) continue;  // its weights are no counts
      const bool of_queries = moment != Moment::key && moment != Moment::value;
      double& expected = of_queries && !promise_.all_queries ? query_rows : rows;
      for (std::size_t head = 0; head < sums.size(); ++head) {
        const double found = sums[head].weight / unit(moment);
        if (expected == 0.0) expected = first_weight(moment, head, found);
        if (found != expected)
          reject(fmt::format("tensor {}.weight: head {}: expected {} as in the layer's other moments, found {}",
                             to_string(moment), head, expected * unit(moment), sums[head].weight));
      }
    }
  }

  double first_weight(Moment moment, std::size_t head, double found) const {
    const auto tokens = static_cast<double>(stats_.tokens), held = static_cast<double>(held_out_tokens());
    const bool partial = held > 0.0 || !promise_.all_queries;
    const bool fits =
        found >= 1.0 && found == std::floor(found) && found <= tokens - held && (partial || found == tokens);
    if (!fits)
      reject(fmt::format("tensor {}.weight: head {}: expected {} {}, found {}", to_string(moment), head,
                         partial ? "a whole number up to" : "the number of rows", (tokens - held) * unit(moment),
                         found * unit(moment)));
    return found;
  }

  void check_moment(Moment moment, const MomentSum& sum, std::size_t head) const {
    const std::string tensor = fmt::format("{}.sum", to_string(moment));
    check_symmetric(tensor, head, sum.sum, static_cast<std::size_t>(sum.dim));
    const auto d = static_cast<std::size_t>(sum.dim);
    std::vector<double> covariance(sum.sum);
    double largest = 0.0;
    for (std::size_t i = 0; i < d; ++i) largest = std::max(largest, sum.sum[i * d + i]);
    // The weight of scored_query is a number of queries, not the sum of the weights: no mean follows from it.
    if (moment != Moment::scored_query)
      for (std::size_t i = 0; i < d; ++i)
        for (std::size_t j = 0; j < d; ++j) covariance[i * d + j] -= sum.mean[i] * (sum.mean[j] / sum.weight);
    if (!is_semidefinite(covariance, d, kNegative * largest))
      reject(
          fmt::format("tensor {}: head {}: expected a second moment{}, found a matrix that is not positive "
                      "semidefinite",
                      tensor, head, moment == Moment::scored_query ? "" : " of rows with the mean of .first"));
  }

  void check_symmetric(const std::string& tensor, std::size_t head, std::span<const double> matrix,
                       std::size_t dim) const {
    double largest = 0.0;
    for (const double value : matrix) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < dim; ++i)
      for (std::size_t j = 0; j <= i; ++j) {
        const double a = matrix[i * dim + j], b = matrix[j * dim + i];
        if (std::abs(a - b) > kAsymmetry * largest)
          reject(
              fmt::format("tensor {}: head {}: expected a symmetric matrix, found {:g} at [{}, {}] and {:g} at "
                          "[{}, {}]",
                          tensor, head, a, i, j, b, j, i));
        if (i == j && a < 0.0)
          reject(fmt::format("tensor {}: head {}: expected a diagonal that is not negative, found {:g} at [{}, {}]",
                             tensor, head, a, i, i));
      }
  }

  /// Matrices [heads, Dv, Dv], rounded to float32 in the dump.
  void check_matrices(const char* tensor, std::vector<double> matrices) const {
    constexpr double kRoundedNegative = 1e-4;
    const auto d = static_cast<std::size_t>(stats_.geometry.v_head_dim);
    for (std::size_t first = 0; first < matrices.size(); first += d * d) {
      const std::span<double> matrix = std::span(matrices).subspan(first, d * d);
      double largest = 0.0;
      for (std::size_t i = 0; i < d; ++i) largest = std::max(largest, matrix[i * d + i]);
      if (!is_semidefinite(matrix, d, kRoundedNegative * largest))
        reject(fmt::format("tensor {}: head {}: expected a positive semidefinite matrix", tensor, first / (d * d)));
    }
  }

  void check_sample() const {
    const TokenSample& sample = stats_.sample;
    const std::int64_t most = std::min(promise_.sample_tokens, stats_.tokens - held_out_tokens());
    if (sample.size() > most)
      reject(fmt::format("tensor sample.key: expected at most {} sampled tokens, found {}", most, sample.size()));
    for (const std::int64_t token : sample.token) {
      if (token < 0 || token >= stats_.tokens)
        reject(fmt::format("tensor sample.token: expected tokens below {}, found {}", stats_.tokens, token));
      if (stats_.held_out && token >= stats_.held_out->token &&
          token < stats_.held_out->token + stats_.held_out->count())
        reject(fmt::format("tensor sample.token: token {} is held out, expected another", token));
    }
    const bool weighted = stats_.moments.count(Moment::scored_value) != 0;
    if (weighted == sample.value_weight.empty())
      reject(fmt::format("tensor sample.value_weight: expected {} moment scored_value, found {}",
                         weighted ? "it with" : "none without", weighted ? "none" : "one"));
  }

  void check_place(const char* tensor, std::int64_t first, std::int64_t count) const {
    if (first < 0 || count > stats_.tokens || first > stats_.tokens - count)
      reject(fmt::format("tensor {}: expected {} tokens from 0 to {}, found them from {} on", tensor, count,
                         stats_.tokens, first));
  }

  const LayerStats& stats_;
  const StatsPromise& promise_;
  const std::string& file_;
};

}  // namespace

void check_stats(const LayerStats& stats, const StatsPromise& promise, const std::string& file) {
  LayerCheck(stats, promise, file).run();
}

}  // namespace kvq
