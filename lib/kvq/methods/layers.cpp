#include <kvq/methods/layers.h>

namespace kvq {

int layers_at_once(const Backend& backend) {
  constexpr int kSideBySide = 8;
  return backend.leaves_processors_free() ? kSideBySide : 1;
}

Decision plan_layers(const StatsSource& source, const MethodContext& context,
                     const std::function<TensorPlan(const LayerStats&, Side)>& plan_side,
                     const std::function<void(const LayerStats&, LayerPlan&)>& finish_layer) {
  Decision decision;
  for_each_layer(
      context.backend, source.size(),
      [&](std::size_t i) {
        const auto stats = source.load(i);
        LayerPlan plan{.layer = stats->layer, .geometry = stats->geometry, .k = plan_side(*stats, Side::k), .v = {}};
        if (stats->has_values) plan.v = plan_side(*stats, Side::v);
        if (finish_layer) finish_layer(*stats, plan);
        validate(plan);
        return plan;
      },
      [&](std::size_t i, LayerPlan plan) {
        decision.plans.push_back(std::move(plan));
        if (context.done) context.done(i);
      });
  return decision;
}

}  // namespace kvq
