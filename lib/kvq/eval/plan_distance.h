#pragma once

#include <kvq/plan/layer_plan.h>

#include <limits>
#include <optional>
#include <span>
#include <vector>

/// Distances between two plans of a side with the same geometry. They do not depend on eigenvector signs, on the basis
/// inside an eigenspace or on the seed of random factors.
namespace kvq {

/// A distance is missing if a plan lacks the compared part, and 0 for equal plans up to rounding. A part that all heads
/// share counts for each head.
struct PlanDistance {
  /// |C - C_ref| / |C_ref|, C = U diag(spectrum) U^T of the kept eigenbasis; the largest of all heads.
  std::optional<double> covariance;
  /// Degrees: largest principal angle between eigenspaces that hold 1% of the trace or more.
  std::optional<double> angle;
  /// Distance of R's factors from the reference's: see factor_distance().
  std::optional<double> factor;
  /// sum_j |diag(R^T C R)_j - ref| / trace C, C of the reference: the covariance that meets each channel.
  std::optional<double> importance;
  /// Of this plan alone: |R^T R - I|; of a transform with an inverse |A^-1 A - I| over its condition.
  std::optional<double> orthogonality;
  /// Distance of channels from the reference's, up to orthogonal maps inside one width, if either plan has a transform:
  /// see gauge_distance().
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

/// Let T = A^-1 A_ref, so that y_ref = y T. A block is the channels of one width, or of one scale group if widths are
/// equal; T_in is T inside the blocks, T_out the rest. The distance is the largest of two norms of T and the same norms
/// of T^-1: the spectral norm of T_in T_in^T - I, by which the energy of a direction changes, and the spectral norm of
/// T_out. Orthogonal maps of either rows inside the blocks do not change the distance, and it is 0 if and only if y_ref
/// is y times orthogonal maps inside the blocks. If a head's widths differ from the reference's, the whole head is one
/// block, so that only the metric A A^T is compared.
double gauge_distance(const TensorPlan& plan, const TensorPlan& reference, int kv_head, int dim);

/// Eigenspaces: runs of descending eigenvalues in which neighbors differ by less than `gap` times the larger one.
/// @return  first index of each run, then the number of eigenvalues
std::vector<std::size_t> eigenspaces(std::span<const float> spectrum, double gap = 0.01);

/// Largest principal angle in degrees between the spans of columns [first, end) of two orthonormal bases [dim, dim].
double principal_angle(std::span<const double> a, std::span<const double> b, int dim, std::size_t first,
                       std::size_t end);

}  // namespace kvq
