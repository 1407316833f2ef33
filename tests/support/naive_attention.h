#pragma once

#include <cstdint>
#include <span>
#include <vector>

/// Causal attention and its moments by their definitions, in double, with the whole score matrix S in memory.
namespace kvq::test {

/// One KV head over one sequence; see compute/attention_moment.h for the extents.
struct AttentionCase {
  std::int64_t tokens = 1;
  int queries = 1, dim = 4, v_dim = 4;
  double scale = 0.5;
  int window = 0;                  ///< 0: all keys up to the query
  double cap = 0.0;                ///< 0: logits as they are
  std::vector<double> sinks = {};  ///< [queries] learned sinks, or empty
  std::vector<float> q = {}, k = {}, v = {};
};

/// Gaussian q, k, v; `logit_size` is the typical magnitude of a logit.
AttentionCase random_case(AttentionCase extents, std::uint64_t seed, double logit_size = 1.0);

/// S of one query head, [T, T].
std::vector<double> softmax_scores(const AttentionCase& input, int query);
/// o = S v of one query head, [T, Dv].
std::vector<double> attention_output(const AttentionCase& input, int query);

/// Sums over the group's query heads, formats/stats.md.
struct NaiveMoments {
  std::vector<double> outputs, outputs_first;            ///< sum o^T o, sum o
  std::vector<double> scored_query, scored_query_first;  ///< sum w q^T q, sum w q
  double scored_query_weight = 0.0;                      ///< sum w
  std::vector<double> column_energy;                     ///< [T] sum S_it^2
};
NaiveMoments naive_moments(const AttentionCase& input);

/// sum += weight * x^T x and first += weight * x for one row.
void add_outer(std::span<const double> x, double weight, std::vector<double>& sum, std::vector<double>& first);

}  // namespace kvq::test
