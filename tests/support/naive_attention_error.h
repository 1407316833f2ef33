#pragma once

#include <kvq/eval/attention_error.h>

#include <array>
#include <string>
#include <vector>

/// The attention errors of eval/attention_error.h by their definitions, in double: one softmax for each query. Beside
/// each sum stands how far float arithmetic may move it, so that a comparison is strict where the sum is well
/// conditioned.
namespace kvq::test {

constexpr std::size_t kAttentionSums = 10;
extern const std::array<const char*, kAttentionSums> kAttentionSumNames;
std::array<double, kAttentionSums> numbers_of(const AttentionSums& sums);

struct NaiveNumber {
  double value = 0.0;
  double bound = 0.0;  ///< on what rounding of the inputs to float products does to it, to first order
};

struct NaiveHead {
  double k_error = 0.0, k_energy = 0.0, v_error = 0.0, v_energy = 0.0;
  std::vector<std::array<NaiveNumber, kAttentionSums>> buckets;
  std::vector<NaiveNumber> divergence;  ///< [queries per KV head, T]
};

struct NaiveErrors {
  std::vector<NaiveHead> heads;
  NaiveNumber projected_error, projected_energy;
};

/// A query reads row j of a side as stored if sink <= j < coded_end(query), places counted in the sequence; without
/// windows all rows.
NaiveErrors naive_attention_errors(const LayerActivations& layer, const StoredLayer& stored, bool with_windows);

/// In words, what of `found` differs from `naive` by more than 1e-6 of its size and what rounding explains; empty if
/// nothing does.
std::string first_disagreement(const LayerError& found, const NaiveErrors& naive);

}  // namespace kvq::test
