#pragma once

#include <kvq/plan/layer_plan.h>

#include <limits>
#include <optional>
#include <span>
#include <vector>

/// How far the plan of a side is from another one of the same geometry, by what does not depend on eigenvector signs,
/// on the basis inside an eigenspace or on the seed of random factors.
namespace kvq {

/// Each is missing where a plan has no such part, and 0 for equal plans (but for rounding). What a plan has for all
/// heads stands for each of them.
struct PlanDistance {
  /// |C - C_ref| / |C_ref|, C = U diag(spectrum) U^T of the kept eigenbasis; the largest of all heads.
  std::optional<double> covariance;
  /// Degrees: largest principal angle between eigenspaces that hold 1% of the trace or more.
  std::optional<double> angle;
  /// How far R is from what its recipe says, beyond the reference: see factor_distance().
  std::optional<double> factor;
  /// sum_j |diag(R^T C R)_j - ref| / trace C, C of the reference: the covariance that meets each channel.
  std::optional<double> importance;
  std::optional<double> orthogonality;  ///< of this plan alone: |R^T R - I|
  std::optional<double> center;         ///< |mu - mu_ref| / |mu_ref|, largest of all heads
  std::optional<double> clip;           ///< largest |rho - rho_ref|
  std::optional<double> codebook;  ///< largest distance of an entry of either table from the nearest one of the other
  std::optional<double> trellis;   ///< largest difference of a theta
  /// Mean distance of a centroid from the nearest of the other set, over their mean distance from the mean.
  std::optional<double> centroids;
};

/// @param plan, reference  of the same dim and number of heads
PlanDistance plan_distance(const TensorPlan& plan, const TensorPlan& reference, int num_kv_heads, int dim);

/// Eigenspaces: runs of eigenvalues (descending) of which neighbours are apart by less than `gap` of the larger one.
/// @return  first places of the runs, and behind them the number of eigenvalues
std::vector<std::size_t> eigenspaces(std::span<const float> spectrum, double gap = 0.01);

/// Largest principal angle in degrees between the spans of columns [first, end) of two orthonormal bases [dim, dim].
double principal_angle(std::span<const double> a, std::span<const double> b, int dim, std::size_t first,
                       std::size_t end);

}  // namespace kvq
