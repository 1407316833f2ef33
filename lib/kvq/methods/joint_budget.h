#pragma once

#include <kvq/methods/allocated_plan.h>
#include <kvq/methods/method.h>

#include <span>
#include <vector>

namespace kvq {

/// Decides plans under one budget for all layers and both sides. Each side of each layer is tried at a ladder of sizes,
/// keys and values separately. The error of attention's output on the held-out tokens decides between sizes and, head
/// by head, between bases: keys in RoPE blocks or rotated as a whole, values in the score-weighted eigenbasis or
/// rotated as a whole, keys and values in the coordinates of klt. `--target runtime` takes sizes that tuned kernels
/// decode (size_search.h). Without a budget every side gets its own bits (SideOptions::bits), and the report states the
/// cost.
/// @throws Error{usage} if the statistics hold no held-out tokens
Decision decide_with_budget(const StatsSource& source, const Options& options, const MethodContext& context);

/// decide_with_budget() once for each target, whatever that of `options` is. Sizes are tried once.
std::vector<Decision> decide_targets(const StatsSource& source, const Options& options, std::span<const Target> targets,
                                     const MethodContext& context);

/// The method's ingredients switched on one after the other, from Block-GTQ as published to everything that `options`
/// says; then both targets.
Ablation ablate(const StatsSource& source, const Options& options, Backend& backend);

using Decide = Decision (*)(const StatsSource&, const Options&, const MethodContext&);
/// Both targets, without ingredients. @param decide  Method::decide
Ablation compare_targets(const StatsSource& source, const Options& options, Backend& backend, Decide decide);

}  // namespace kvq
