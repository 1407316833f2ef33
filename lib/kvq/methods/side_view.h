#pragma once

#include <kvq/methods/options.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/solve/metric_transform.h>
#include <kvq/stats/layer_stats.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace kvq {

/// Statistics of one KV head of a side in the coordinates of a transform.
struct HeadView {
  std::map<Moment, MomentSum> moments;  ///< of the side
  std::vector<double> metric;           ///< o_proj's, of values
};

/// The transforms of a side's heads, by kind, and the heads in their coordinates, each computed when it is first asked
/// for: views of one side that differ in some heads share the others. For one thread at a time.
class HeadTransforms {
 public:
  /// All outlive it.
  HeadTransforms(const LayerStats& stats, const Options& options, Side side)
      : stats_(stats), options_(options), side_(side) {}

  /// Computes what is missing for these kinds. @param kinds  [H] of each entry of the scope
  /// @throws  Error{numerical} naming layer and side if a covariance or metric cannot be balanced
  void prepare(const std::vector<TransformKind>& kinds);
  /// Of an entry and of a KV head, after prepare().
  const HeadTransform& transform(TransformKind kind, std::size_t entry) const { return transforms_.at({kind, entry}); }
  const HeadView& view(TransformKind kind, std::size_t head) const { return views_.at({kind, head}); }

  const LayerStats& stats() const { return stats_; }
  Side side() const { return side_; }
  std::size_t entry_of(std::size_t head) const { return options_.scope == Scope::layer ? 0 : head; }

 private:
  /// Covariance, metric and mean of the rows of one entry, averaged over the heads that share the entry.
  struct EntryMoments;
  static std::vector<EntryMoments> entry_moments(const LayerStats& stats, const Options& options, Side side);
  friend std::vector<double> outlier_gains(const LayerStats& stats, const Options& options, Side side);

  const LayerStats& stats_;
  const Options& options_;
  Side side_;
  std::map<std::pair<TransformKind, std::size_t>, HeadTransform> transforms_;
  std::map<std::pair<TransformKind, std::size_t>, HeadView> views_;
};

/// One side of a layer in the coordinates of its transforms: rows x A, queries q A^-T, metrics A^-1 W A^-T, and all
/// moments of them. A method decides in these coordinates as if the model were scaled this way, and compose() maps the
/// decision back to the model's own rows.
class SideView {
 public:
  /// @param kinds  [H] a transform for each entry of the scope
  /// @throws       errors of HeadTransforms::prepare()
  SideView(HeadTransforms& transforms, std::vector<TransformKind> kinds);
  /// With the transform that the options name, for all entries.
  SideView(const LayerStats& stats, const Options& options, Side side);

  Side side() const { return side_; }
  /// The layer in the model's own coordinates.
  const LayerStats& original() const { return original_; }
  /// The layer in the coordinates of this side; the other side, golden, held-out and sampled rows are left out.
  /// original() if no entry has a transform.
  const LayerStats& stats() const { return view_ ? *view_ : original_; }
  /// The side's sampled rows in these coordinates, computed when they are first asked for. Any thread may ask.
  const SampledRows& sample() const;
  TransformKind kind(int entry) const { return kinds_[static_cast<std::size_t>(entry)]; }
  bool is_orthogonal() const { return view_ == nullptr; }

  /// Changes a plan for stats() into a plan for original(): center, map with its inverse, and the description of the
  /// transform.
  void compose(TensorPlan& plan, const Options& options) const;

 private:
  void make_view(HeadTransforms& transforms);

  const LayerStats& original_;
  Side side_;
  std::vector<TransformKind> kinds_;
  std::vector<HeadTransform> heads_;  ///< [H]
  std::unique_ptr<const LayerStats> view_;
  mutable std::once_flag sampled_;
  mutable SampledRows sample_;
};

/// Outlier gain of each KV head of a side, for reports; it does not depend on the transform.
std::vector<double> outlier_gains(const LayerStats& stats, const Options& options, Side side);

}  // namespace kvq
