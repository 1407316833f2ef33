#pragma once

#include <kvq/compute/coded_error.h>

#include <string>
#include <vector>

namespace kvq {

/// One row of OSCAR Table 10: the effect of a rotation on one head's keys (or values) with 2-bit affine codes.
struct RotationRow {
  std::string recipe;            ///< I, H, U, U*H, U*H*P
  double largest = 0.0;          ///< max |x_rot| over all rows and channels
  double group_range = 0.0;      ///< mean over rows and groups of max - min
  double importance_peak = 0.0;  ///< max / mean of diag(R^T C R)
  double importance_spread =
      0.0;  ///< largest relative deviation of diag(R^T C R) from its mean within a Hadamard block (Lemma 1: 0)
  double error_trace = 0.0;  ///< tr(E): mean squared length of the quantization error, without clip
};

/// The five rows for one head.
/// @param target  C, [D, D] (the target whose eigenbasis U is)
std::vector<RotationRow> rotation_rows(const FitData& data, std::span<const double> target, int group_size);

/// OSCAR Figure 7: mean |cosine| between the k-th eigenvectors of two symmetric matrices, k = 1..8. Random bases give
/// about sqrt(2 / (pi D)), 0.07 at D = 128.
double top8_alignment(std::span<const double> a, std::span<const double> b, int dim);

}  // namespace kvq
