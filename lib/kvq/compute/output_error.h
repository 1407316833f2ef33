#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// One KV head's attention over the first n tokens of a sequence, to compare quantized keys and values with exact ones.
struct AttentionCase {
  int dim = 0, v_dim = 0, queries_per_head = 1;
  double scale = 1.0;
  int window = 0;                          ///< 0 = all keys before and at the query, else the last `window`
  double cap = 0.0;                        ///< logit_softcap; 0 = none
  std::vector<double> sinks = {};          ///< [queries_per_head] learned sinks, or empty
  int sink_tokens = 0, recent_tokens = 0;  ///< keys and values that stay exact, seen from each query
  std::vector<std::int64_t> query = {};    ///< [m] positions
  std::vector<float> q = {};               ///< [queries_per_head, m, D]
  std::vector<float> k = {}, v = {};       ///< [n, D], [n, Dv]
  std::vector<float> curvature = {};       ///< [queries_per_head, Dv, Dv] or empty for the identity
  std::vector<double> output_metric = {};  ///< [Dv, Dv] M of squared errors e M e, or empty for the identity
};

/// Size of a change e of the outputs: 1/2 mean over queries of a sum over the group's heads.
struct OutputChange {
  double curved = 0.0;   ///< of e G e: nats a token with the dump's curvature (Fisher); equal to `plain` without
  double squared = 0.0;  ///< of e M e, M the output metric
  OutputChange& operator+=(const OutputChange& other) {
    curved += other.curved;
    squared += other.squared;
    return *this;
  }
};

/// Computes the exact outputs and weights of a case once, then the error that other keys or values cause.
class OutputError {
 public:
  explicit OutputError(AttentionCase data);

  OutputChange of_keys(std::span<const float> k) const;
  OutputChange of_values(std::span<const float> v) const;
  /// The same for the exact outputs themselves; errors are divided by it.
  const OutputChange& energy() const { return energy_; }
  const AttentionCase& data() const { return data_; }

 private:
  std::vector<float> weights(int head, std::span<const float> k) const;  ///< [m, n] softmax
  OutputChange form(int head, std::span<const float> e) const;           ///< of [m, Dv]

  AttentionCase data_;
  std::vector<std::vector<float>> weights_, outputs_;  ///< per query head, [m, n] and [m, Dv]
  OutputChange energy_;
};

}  // namespace kvq
