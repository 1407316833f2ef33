#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// One KV head's attention over a whole beginning of a sequence, for comparing coded keys and values with exact ones.
struct AttentionCase {
  int dim = 0, v_dim = 0, queries_per_head = 1;
  double scale = 1.0;
  int window = 0;                        ///< 0 = all keys before and at the query, else the last `window`
  int sink_tokens = 0, recent_tokens = 0;  ///< keys and values that stay exact, seen from each query
  std::vector<std::int64_t> query;       ///< [m] positions
  std::vector<float> q;                  ///< [queries_per_head, m, D]
  std::vector<float> k, v;               ///< [n, D], [n, Dv]
  std::vector<float> curvature;          ///< [queries_per_head, Dv, Dv] or empty for the identity
};

/// Exact outputs and weights of a case, made once; then the error that other keys or values cause.
class OutputError {
 public:
  explicit OutputError(AttentionCase data);

  /// 1/2 mean over queries of the sum over the group's heads of e G e^T, e the change of a head's output: nats a token with the dump's
  /// curvature (Fisher), half the squared change without.
  double of_keys(std::span<const float> k) const;
  double of_values(std::span<const float> v) const;
  /// The same form for the outputs themselves: what errors are relative to.
  double energy() const { return energy_; }
  const AttentionCase& data() const { return data_; }

 private:
  std::vector<float> weights(int head, std::span<const float> k) const;  ///< [m, n] softmax
  double form(int head, std::span<const float> e) const;                 ///< of [m, Dv]

  AttentionCase data_;
  std::vector<std::vector<float>> weights_, outputs_;  ///< per query head, [m, n] and [m, Dv]
  double energy_ = 0.0;
};

}  // namespace kvq
