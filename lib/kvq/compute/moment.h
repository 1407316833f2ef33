#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// Sum of outer products of the rows of one head, in double: a monoid. Symmetric; only the upper triangle is valid
/// until `symmetrize()`.
struct MomentSum {
  int dim = 0;
  std::vector<double> sum;   ///< [D, D], sum of w x x^T
  std::vector<double> mean;  ///< [D], sum of w x (not divided)
  double weight = 0.0;       ///< sum of w; the number of rows when unweighted

  explicit MomentSum(int d = 0);
  /// Adds rows [rows, D]; `weights` is [rows], non-negative, or empty for 1. Rows are widened to double before the
  /// product.
  void add(std::span<const float> rows, std::span<const float> weights = {});
  void add(const MomentSum& other);
  void subtract(const MomentSum& other);  ///< reverses an earlier add(other), up to rounding
  void symmetrize();
};

}  // namespace kvq
