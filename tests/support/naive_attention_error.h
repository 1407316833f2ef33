#pragma once

#include <kvq/eval/attention_error.h>

#include <array>
#include <string>
#include <vector>

/// The attention errors of eval/attention_error.h by their definitions, in double, with one softmax for each query.
/// Each sum has a bound on what float arithmetic may change, so that comparisons are strict where the sum is well
/// conditioned.
namespace kvq::test {

constexpr std::size_t kAttentionSums = 14;
extern const std::array<const char*, kAttentionSums> kAttentionSumNames;
std::array<double, kAttentionSums> numbers_of(const AttentionSums& sums);

struct NaiveNumber {
  double value = 0.0;
  double bound = 0.0;  ///< first-order bound on the change that rounded inputs of float products cause
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

/// A query reads row j of a side as stored if sink <= j < coded_end(query), where j counts within the sequence; without
/// windows, it reads all rows as stored.
NaiveErrors naive_attention_errors(const LayerActivations& layer, const StoredLayer& stored, bool with_windows);

/// Names the first number of `found` that differs from `naive` by more than 1e-6 of its size plus the bound; empty if
/// none does.
std::string first_disagreement(const LayerError& found, const NaiveErrors& naive);

}  // namespace kvq::test
