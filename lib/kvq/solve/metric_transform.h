#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

/// Maps of a head's rows that follow the metric of their errors, so that decisions do not depend on how a model is
/// scaled (formats/artifact.md, "Transforms"). C is the covariance of the rows, W the metric: an error e of a row costs
/// e W e^T.
namespace kvq {

enum class TransformKind { orthogonal, diagonal, balanced, klt };
const char* to_string(TransformKind kind);

/// x -> x A of one head, with A^-1. Empty matrices mean the identity.
struct HeadTransform {
  std::vector<double> scale;            ///< [D] bfloat16 numbers, of a diagonal transform
  std::vector<double> matrix, inverse;  ///< [D, D] A and A^-1, also of a diagonal transform
  double outlier_gain = 1.0;            ///< tr W tr C / (tr (C^1/2 W C^1/2)^1/2)^2, at least 1
};

/// Channels that share a factor, each in one pair or in none (a rotary pair of keys).
using ChannelPairs = std::vector<std::pair<int, int>>;

/// A = diag((W_ii / C_ii)^(1/4)) times a common factor that gives rows a mean square of 1, rounded to bfloat16:
/// smallest tr(A^-1 W A^-1) tr(A C A) of all diagonal A. Channels without variance or without metric get the geometric
/// mean of the other factors.
/// @param c, w    [D, D] symmetric, positive semidefinite
/// @param tokens  rows that C was estimated from
HeadTransform diagonal_transform(std::span<const double> c, std::span<const double> w, int dim, std::int64_t tokens,
                                 const ChannelPairs& pairs);

/// A = Z diag(s^(1/4)): Z the simultaneous diagonalization Z^T C Z = I, Z^-1 W Z^-T = diag(s), s descending. So rows x
/// A have covariance and metric diag(sqrt(s)), and tr(A^-1 W A^-T) tr(A^T C A) is smallest of all A. With signs that
/// make mean @ A positive, A is unique where the s differ: if rows become x M and the metric M^-1 W M^-T, x M A' = x A.
/// Rows get a mean square of 1. With few tokens the small eigenvalues of C are estimated too small, and A would amplify
/// directions that the tokens did not show. So a part of the mean diagonal is added to C and to W, both scaled to equal
/// diagonals: D / tokens - 1 / kTokensPerChannel, at least 1e-13. As long as the condition number of A
/// (transform_condition() of plans) exceeds `most_condition`, the part is multiplied by ten.
/// @param mean  [D] of the rows, for signs; empty: the largest component of each column is positive
HeadTransform balanced_transform(std::span<const double> c, std::span<const double> w, std::span<const double> mean,
                                 int dim, std::int64_t tokens, double most_condition);

/// HeadTransform::outlier_gain of a head; it does not depend on the transform.
double outlier_gain(std::span<const double> c, std::span<const double> w, int dim, std::int64_t tokens);

inline constexpr double kTokensPerChannel = 8.0;

}  // namespace kvq
