#pragma once

#include <kvq/compute/moment.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// One KV head and its query heads over one sequence. All arrays are contiguous float32.
struct AttentionInput {
  std::int64_t tokens = 0;
  int queries = 1;  ///< query heads that read this KV head
  int dim = 0, v_dim = 0;
  double scale = 1.0;                    ///< softmax_scale
  int window = 0;                        ///< 0 = all keys before and at the query, else the last `window`
  double cap = 0.0;                      ///< logit_softcap; 0 = none
  std::span<const double> sinks = {};    ///< [queries] learned sinks, which take weight and have no value; or empty
  const float* q = nullptr;              ///< [queries, T, D]
  const float* k = nullptr;              ///< [T, D]
  const float* v = nullptr;              ///< [T, Dv]
  const std::uint8_t* counts = nullptr;  ///< [T] 0: the token's queries are in no sum; null: all queries count
};

/// Statistics of the exact causal softmax S of one KV head that weigh errors. Sums over the tokens whose queries count,
/// and over the group's query heads.
///   outputs       sum_i o_i o_i^T with o = S V: N times OSCAR's C_S = (1/N) V^T S^T S V (section 3)
///   column_energy [T] a_t = sum_i S_it^2: squared output error per unit error of value t, if errors of different
///                 tokens are uncorrelated (the diagonal of S^T S)
///   scored_query  sum_i w_i q_i q_i^T, w_i = scale^2 sum_t (S_it c_it)^2 |v_t - o_i|^2: see collect.h, C_SQ. c_it is
///                 the slope of the logit's cap, 1 - (logit / cap)^2 at the capped logit; 1 without a cap
struct AttentionMoments {
  MomentSum outputs;
  MomentSum scored_query;  ///< only if with_scored_query
  std::vector<double> column_energy;
};

/// Adds one sequence to `into` (column_energy is overwritten, [T]). S is computed in float32, one panel of rows at a
/// time; moments are summed in double. A thread's panel has at most 256 rows; for long sequences it has fewer, but at
/// least 32, to stay near 32 MB. Panels are summed in order, so the result does not depend on the number of threads.
void add_attention_moments(const AttentionInput& input, bool with_scored_query, AttentionMoments& into);

}  // namespace kvq
