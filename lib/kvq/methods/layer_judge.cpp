#include <kvq/core/error.h>
#include <kvq/methods/layer_judge.h>

#include <algorithm>

namespace kvq {

bool measures_behind_o_proj(const LayerStats& stats, const Options& options) {
  const bool transforms = options.choose_transform || options.k.transform != TransformKind::orthogonal ||
                          options.v.transform != TransformKind::orthogonal;
  return transforms && stats.has_values && !stats.o_proj_metric.empty();
}

LayerJudge::LayerJudge(const LayerStats& stats, bool behind_o_proj, const Windows& windows, Backend& backend)
    : stats_(stats) {
  if (!stats.held_out)
    throw Error{ErrorKind::usage,
                fmt::format("layer {}: the statistics hold no held-out tokens to compare plans on", stats.layer),
                "collect from the dump with this method (--model), or with --held-out-tokens; a dump needs 24 tokens"};
  const HeldOut& held = *stats.held_out;
  const LayerGeometry& g = stats.geometry;
  std::vector<AttentionCase> cases;
  for (int h = 0; h < g.num_kv_heads; ++h) {
    AttentionCase one{
        .dim = g.head_dim,
        .v_dim = stats.has_values ? g.v_head_dim : g.head_dim,
        .queries_per_head = g.queries_per_kv_head(),
        .scale = g.softmax_scale,
        .window = g.sliding_window,
        .cap = g.logit_softcap,
        .sinks = {g.sinks_of(h).begin(), g.sinks_of(h).end()},
        .sink_tokens = windows.sink_tokens,
        .recent_tokens = windows.recent_tokens,
        .query = held.query,
        .q = {},
        .k = held.k.head(h),
        .v = (stats.has_values ? held.v : held.k).head(h),
        .curvature = {},
        .output_metric = {},
    };
    if (behind_o_proj) {
      const auto size = static_cast<std::size_t>(g.v_head_dim) * static_cast<std::size_t>(g.v_head_dim);
      const auto start = stats.o_proj_metric.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(h) * size);
      one.output_metric.assign(start, start + static_cast<std::ptrdiff_t>(size));
    }
    for (int i = 0; i < one.queries_per_head; ++i) {
      const int q_head = h * one.queries_per_head + i;
      const std::vector<float> q = held.q.head(q_head);
      one.q.insert(one.q.end(), q.begin(), q.end());
      if (held.curvature.empty() || !stats.has_values) continue;
      const auto size = static_cast<std::size_t>(g.v_head_dim) * static_cast<std::size_t>(g.v_head_dim);
      const auto start = held.curvature.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(q_head) * size);
      one.curvature.insert(one.curvature.end(), start, start + static_cast<std::ptrdiff_t>(size));
    }
    cases.push_back(std::move(one));
  }
  heads_ = backend.judge_outputs(std::move(cases));
}

std::vector<OutputChange> LayerJudge::changes(const TensorPlan& plan, Side side) const {
  std::vector<OutputChange> result = heads_->changes(plan, side);
  for (OutputChange& change : result) change.squared /= std::max(heads_->energy().squared, 1e-300);
  return result;
}

}  // namespace kvq
