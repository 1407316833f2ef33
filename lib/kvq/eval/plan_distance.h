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
  /// Of this plan alone: |R^T R - I|; of a transform with an inverse |A^-1 A - I| over its condition.
  std::optional<double> orthogonality;
  /// How far coded channels are from the reference's but for orthogonal maps inside one width, where either has a
  /// transform: see gauge_distance().
  std::optional<double> gauge;
  std::optional<double> channel_scale;  ///< largest |log2 (s / s_ref)|
  std::optional<double> outlier_gain;   ///< largest |g / g_ref - 1| of a head
  std::optional<double> center;         ///< |mu - mu_ref| / |mu_ref|, largest of all heads
  std::optional<double> clip;           ///< largest |rho - rho_ref|
  std::optional<double> codebook;  ///< largest distance of an entry of either table from the nearest one of the other
  std::optional<double> trellis;   ///< largest difference of a theta
  /// Mean distance of a centroid from the nearest of the other set, over their mean distance from the mean.
  std::optional<double> centroids;
};

/// @param plan, reference  of the same dim and number of heads
PlanDistance plan_distance(const TensorPlan& plan, const TensorPlan& reference, int num_kv_heads, int dim);

/// With T = A^-1 A_ref, so that y_ref = y T: how much the energy of any direction changes, the spectral norm of T T^T -
/// I, of T without what lies outside of the blocks of one width (one scale group, where widths are equal); the spectral
/// norm of what lies there; or the same of T^-1, if that is larger. Orthogonal maps of either rows inside the blocks
/// change none of it, and it is 0 if and only if y_ref is y times such maps. A head whose widths are others than the
/// reference's is one block: only the metric A A^T is compared then.
double gauge_distance(const TensorPlan& plan, const TensorPlan& reference, int kv_head, int dim);

/// Eigenspaces: runs of eigenvalues (descending) of which neighbours are apart by less than `gap` of the larger one.
/// @return  first places of the runs, and behind them the number of eigenvalues
std::vector<std::size_t> eigenspaces(std::span<const float> spectrum, double gap = 0.01);

/// Largest principal angle in degrees between the spans of columns [first, end) of two orthonormal bases [dim, dim].
double principal_angle(std::span<const double> a, std::span<const double> b, int dim, std::size_t first,
                       std::size_t end);

}  // namespace kvq
