#pragma once

#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// What a cache should give back, from the reference codec, of layers with head_dim 128 and bfloat16 rows.
namespace kvq::test {

constexpr std::size_t kDim = 128;

std::vector<float> floats(std::span<const std::uint16_t> bits);

/// One side of a token [Hkv, D] while it is exact and when it is coded.
struct ExpectedRow {
  /// @param from_window  it is coded when it leaves the window, from bfloat16
  ExpectedRow(const TensorPlan& plan, std::span<const float> rows, bool from_window);
  /// A token that attends as the model gave it.
  explicit ExpectedRow(std::span<const float> rows) : exact(rows.begin(), rows.end()), coded(exact) {}
  std::vector<float> exact, coded;
};

/// A sequence as it should be.
struct Expected {
  std::vector<ExpectedRow> k, v;
  /// The next token, of a step after which the sequence has `length`.
  void grow(const LayerPlan& plan, const Windows& windows, std::int64_t length, std::span<const float> key,
            std::span<const float> value);
};

/// [Hq, D] attention of one query over the sequence, in double.
/// @param cached  tokens in the cache, whose number decides who is exact; 0: all
std::vector<double> attend_expected(const LayerPlan& plan, const Windows& windows, const Expected& s,
                                    std::span<const float> q, std::int64_t cached = 0);

/// Relative Frobenius norm of the difference.
double relative_error(std::span<const float> found, std::span<const double> expected);

/// Results beside what they should be.
struct Comparison {
  double error;    ///< relative_error()
  double allowed;  ///< twice that of the expected ones in bfloat16, and a little
};
Comparison compare(std::span<const float> found, std::span<const double> expected);

}  // namespace kvq::test
