#pragma once

#include <kvq/methods/options.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/solve/metric_transform.h>
#include <kvq/stats/layer_stats.h>

#include <memory>
#include <vector>

namespace kvq {

/// One side of a layer in the coordinates of its transforms: rows x A, queries q A^-T, metrics A^-1 W A^-T, and all
/// moments of them. A method decides in these coordinates as if the model were scaled this way, and compose() maps the
/// decision back to the model's own rows.
class SideView {
 public:
  /// @param kinds  [H] a transform for each entry of the scope
  /// @throws       Error{numerical} naming layer and side if a covariance or metric cannot be balanced
  SideView(const LayerStats& stats, const Options& options, Side side, std::vector<TransformKind> kinds);
  /// With the transform that the options name, for all entries.
  SideView(const LayerStats& stats, const Options& options, Side side);

  Side side() const { return side_; }
  /// The layer in the model's own coordinates.
  const LayerStats& original() const { return original_; }
  /// The layer in the coordinates of this side; the other side, golden and held-out rows are left out. original() if no
  /// entry has a transform.
  const LayerStats& stats() const { return view_ ? *view_ : original_; }
  TransformKind kind(int entry) const { return kinds_[static_cast<std::size_t>(entry)]; }
  bool is_orthogonal() const { return view_ == nullptr; }

  /// Changes a plan for stats() into a plan for original(): center, map with its inverse, and the description of the
  /// transform.
  void compose(TensorPlan& plan, const Options& options) const;

 private:
  const LayerStats& original_;
  Side side_;
  std::vector<TransformKind> kinds_;
  std::vector<HeadTransform> heads_;  ///< [H]
  std::unique_ptr<const LayerStats> view_;
};

/// Outlier gain of each KV head of a side, for reports; it does not depend on the transform.
std::vector<double> outlier_gains(const LayerStats& stats, const Options& options, Side side);

}  // namespace kvq
