#pragma once

#include <kvq/codec/rotation_matrix.h>
#include <kvq/compute/backend.h>
#include <kvq/methods/method.h>
#include <kvq/methods/side_view.h>
#include <kvq/solve/rotation_report.h>

#include <functional>

namespace kvq {

/// Input of a method that chooses the rotation of one side of one layer. With a transform, all fields are in the
/// coordinates of a SideView. `data` is the sample, `center` its channel means.
struct RotationRequest {
  const LayerStats& stats;
  const Options& options;
  Side side;
  const Coder& coder;
  const std::vector<FitData>& data;  ///< one per KV head
  const std::vector<float>& center;  ///< [H, D] or empty
  Backend& backend;
  int dim() const { return stats.geometry.dim(side); }
  int heads() const { return options.scope == Scope::layer ? 1 : stats.geometry.num_kv_heads; }
  /// Indices into `data` of the KV heads that share entry h.
  std::vector<std::size_t> members(int h) const;
};
using ChooseRotation = Rotation (*)(const RotationRequest&);

/// Plans for every layer by one recipe: center, rotation (the method's), coder, clip search, error before and after.
/// @param preferred_group  the method's group size if the options name none, 0 = head_dim
Decision decide_by_rotation(const StatsSource& source, const Options& options, const MethodContext& context,
                            ChooseRotation choose, int preferred_group);

/// Whether a side stays exact, and the plan of an exact side.
bool stays_exact(const Options& options, int layer, Side side);
TensorPlan exact_plan(const Options& options);

/// Channel means [H, D] of one side, averaged over the heads that share an entry.
std::vector<float> make_center(const LayerStats& stats, const Options& options, Side side);

/// FitError::metric of a side.
const char* metric_name(const SideView& view);

/// The plan of one side by the recipe of decide_by_rotation().
TensorPlan plan_side(const LayerStats& stats, const Options& options, Side side, ChooseRotation choose,
                     int preferred_group, Backend& backend);

/// Moments that centering, clip search and error reporting need beside the method's own moments.
std::set<Moment> common_needs(const Options& options);

/// Mean of a moment per entry of a scope, [H] of [D, D]: of each KV head, or averaged over the heads that share an
/// entry.
std::vector<std::vector<double>> scoped_moment(const RotationRequest& request, Moment which, bool centered);

/// Eigendecompositions of matrices [D, D], as one batch.
std::vector<EigenPairs> eigenbases(const std::vector<std::vector<double>>& matrices, int dim, Backend& backend);

/// coding_cost() of rows that share a codec, summed over the heads.
double coding_cost_of(std::span<const RotatedData> heads, const RowCodec& codec, Backend& backend);

/// Sample and metric of every KV head of one side.
/// @param output_metric  errors of values in o_proj's metric, if the statistics have it
std::vector<FitData> fit_data(const LayerStats& stats, Side side, bool output_metric = false);
/// Sample and metric in the coordinates of a view; values in o_proj's metric if the view has a transform.
std::vector<FitData> fit_data(const SideView& view);
/// fit_data() without rows and their weights.
std::vector<FitData> fit_metrics(const LayerStats& stats, Side side, bool output_metric);

/// OSCAR Table 10 and Figure 7 of one layer. With Scope::layer, as in the paper, C_Q and K^T K are averaged over the KV
/// heads and one rotation serves all heads.
struct LayerRotationReport {
  struct Head {
    std::vector<RotationRow> k;
    double alignment = 0.0;  ///< Figure 7: query against key eigenbasis
  };
  int layer = 0;
  std::vector<Head> heads;
};
LayerRotationReport report_rotations(const LayerStats& stats, Scope scope, int group_size);

}  // namespace kvq
