#pragma once

#include <kvq/compute/backend.h>
#include <kvq/methods/options.h>
#include <kvq/stats/layer_stats.h>

#include <memory>
#include <vector>

namespace kvq {

/// Whether squared errors of outputs are measured in o_proj's metric. With transforms they are, because scaling a model
/// does not change this measure.
bool measures_behind_o_proj(const LayerStats& stats, const Options& options);

/// One layer's attention over the held-out tokens, head by head. For a layer without values (mla_rope) the keys take
/// the place of the values: the error is that of the average of the keys under the changed weights.
class LayerJudge {
 public:
  /// @param behind_o_proj  squared errors are measured in o_proj's metric
  /// @param windows        tokens that stay exact, seen from each query
  /// @throws               Error{usage} if the statistics hold no held-out tokens
  LayerJudge(const LayerStats& stats, bool behind_o_proj, const Windows& windows, Backend& backend);

  /// Change of the outputs caused by each KV head's rows under a plan: nats per token, and the square relative to the
  /// layer's outputs.
  std::vector<OutputChange> changes(const TensorPlan& plan, Side side) const;
  bool has_curvature() const { return stats_.has_values && !stats_.held_out->curvature.empty(); }

 private:
  const LayerStats& stats_;
  std::unique_ptr<OutputJudge> heads_;
};

}  // namespace kvq
