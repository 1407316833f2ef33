#pragma once

#include <kvq/compute/parallel.h>
#include <kvq/methods/method.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

/// Loops over the layers of a source of statistics. A backend that leaves processors free has several layers in work at
/// a time, because one layer's loading and host code would leave the backend idle.
namespace kvq {

/// Layers that are in work, and in memory, at a time.
int layers_at_once(const Backend& backend);

/// Calls take(layer, what compute(layer) returned) for `count` layers in their order, one at a time, on any thread;
/// compute() of layers_at_once() layers runs side by side. Errors are those of ordered_parallel_for().
template <typename Compute, typename Take>
void for_each_layer(const Backend& backend, std::size_t count, Compute compute, Take take) {
  std::vector<std::optional<decltype(compute(count))>> computed(count);
  ordered_parallel_for(
      static_cast<std::int64_t>(count), layers_at_once(backend),
      [&](std::int64_t i) { computed[static_cast<std::size_t>(i)] = compute(static_cast<std::size_t>(i)); },
      [&](std::int64_t i) {
        const auto layer = static_cast<std::size_t>(i);
        take(layer, *std::exchange(computed[layer], std::nullopt));
      });
}

/// The plans of all layers, side by side. Both functions are called from any thread.
/// @param finish_layer  changes a layer's plan, of which both sides are planned; may be empty
/// @throws  errors of the source and of the functions
Decision plan_layers(const StatsSource& source, const MethodContext& context,
                     const std::function<TensorPlan(const LayerStats&, Side)>& plan_side,
                     const std::function<void(const LayerStats&, LayerPlan&)>& finish_layer = {});

}  // namespace kvq
