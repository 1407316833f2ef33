#pragma once

#include <kvq/methods/allocated_plan.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

/// Plans under one budget for all layers and both sides. Each side of each layer is tried at a ladder of sizes, keys
/// and values apart; the error of attention's output on the held-out tokens decides, also between bases, head by head:
/// keys in RoPE blocks or rotated as a whole, values in the score-weighted eigenbasis or rotated, both in the
/// coordinates of klt. Without a budget every side gets its own bits (SideOptions::bits), and the report says what that
/// costs.
/// @throws Error{usage} if the statistics hold no held-out tokens
Decision decide_with_budget(const StatsSource& source, const Options& options, const LayerDone& done);

/// One step of the ablation: what the same budget costs without or with an ingredient.
struct AblationRow {
  std::string ingredient;
  BudgetReport report;
};
/// The method's ingredients switched on one after the other, from Block-GTQ as published to everything that `options`
/// says.
std::vector<AblationRow> ablate(const StatsSource& source, const Options& options);

}  // namespace kvq
