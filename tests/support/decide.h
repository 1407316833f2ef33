#pragma once

#include "support/layers.h"

#include <functional>
#include <string>
#include <vector>

namespace kvq::test {

/// The default options of a method, changed by `change`.
Options options_of(const std::string& method, const std::function<void(Options&)>& change = {});

/// Collects the statistics of the layer that the method needs.
LayerStats stats_for(const LayerActivations& layer, const Options& options, std::int64_t sample_tokens = 64);

/// Collects statistics and decides the plan of one layer.
LayerPlan decide_one(const LayerActivations& layer, const Options& options, std::int64_t sample_tokens = 64);

/// Relative error of a plan on the sampled rows of one side, with the codec's own arithmetic: sum e C_Q e^T over
/// sum x C_Q x^T for keys, sum a |e|^2 over sum a |x|^2 for values (a = 1 where the sample has no weights).
double measured_error(const LayerStats& stats, const TensorPlan& plan, Side side);

}  // namespace kvq::test
