#pragma once

#include <kvq/methods/allocated_plan.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

/// What a budget over layers and sides was spent on, and how good that is.
struct BudgetReport {
  std::string unit;  ///< "bits" (average code bits) or "bytes" (a token and layer, average over layers)
  double budget = 0.0;
  double spent = 0.0;
  double mean_bits = 0.0;   ///< code bits, average over all channels of the coded sides
  double mean_bytes = 0.0;  ///< bytes of a token, average over layers; exact sides and layers count two bytes a channel
  std::string metric;       ///< "nll" (nats a token, from the dump's output curvature), "relative_output" or
                            ///< "relative_residual" (squared, of a layer's outputs, of what o_proj makes of them)
  double cost = 0.0;        ///< of the chosen plans, on the held-out tokens: sum over layers and sides
  double gap =
      0.0;  ///< at most this much better, relatively, is any other choice of the same candidates (Lagrangian bound)
  std::int64_t tokens = 0;  ///< held out
};

struct BudgetDecision {
  std::vector<LayerPlan> plans;
  BudgetReport report;
};

/// Plans under one budget for all layers and both sides. Each side of each layer is tried at a ladder of sizes, keys
/// and values apart; the error of attention's output on the held-out tokens decides, also between bases, head by head:
/// keys in RoPE blocks or rotated as a whole, values in the score-weighted eigenbasis or rotated, both in the
/// coordinates of klt. Without a budget every side gets its own bits (SideOptions::bits), and the report says what that
/// costs.
/// @throws Error{usage} if the statistics hold no held-out tokens
BudgetDecision decide_with_budget(const StatsSource& source, const Options& options, const LayerDone& done);

/// One step of the ablation: what the same budget costs without or with an ingredient.
struct AblationRow {
  std::string ingredient;
  BudgetReport report;
};
/// The method's ingredients switched on one after the other, from Block-GTQ as published to everything that `options`
/// says.
std::vector<AblationRow> ablate(const StatsSource& source, const Options& options);

}  // namespace kvq
