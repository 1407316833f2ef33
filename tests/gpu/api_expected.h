#pragma once

#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Expected contents of a cache, from the reference codec, for layers with head_dim 128 and bfloat16 rows.
namespace kvq::test {

constexpr std::size_t kDim = 128;

std::vector<float> floats(std::span<const std::uint16_t> bits);

/// One side of a token [Hkv, D], as exact rows and as codes give it.
struct ExpectedRow {
  ExpectedRow(const TensorPlan& plan, std::span<const float> rows);
  /// A token that is not rounded at all.
  explicit ExpectedRow(std::span<const float> rows) : exact(rows.begin(), rows.end()), coded(exact) {}
  std::vector<float> exact, coded;
};

/// The expected contents of a sequence.
struct Expected {
  std::vector<ExpectedRow> k, v;
  std::int64_t exact_from = 0;
  bool has_sinks = true;
  /// Appends the next token.
  void grow(const LayerPlan& plan, std::span<const float> key, std::span<const float> value);
};

/// [Hq, D] attention of one query over the sequence, in double.
/// @param cached  number of tokens in the cache, which decides which of them are exact; 0: all
std::vector<double> attend_expected(const LayerPlan& plan, const Windows& windows, const Expected& s,
                                    std::span<const float> q, std::int64_t cached = 0);

/// Relative Frobenius norm of the difference.
double relative_error(std::span<const float> found, std::span<const double> expected);

/// Results compared with the expected ones.
struct Comparison {
  double error;    ///< relative_error()
  double allowed;  ///< twice the error of rounding the expected results to bfloat16, and a little
};
Comparison compare(std::span<const float> found, std::span<const double> expected);

}  // namespace kvq::test
