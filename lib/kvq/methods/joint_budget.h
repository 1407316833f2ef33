#pragma once

#include <kvq/methods/allocated_plan.h>
#include <kvq/methods/method.h>

#include <string>
#include <vector>

namespace kvq {

/// How a budget over layers and sides was spent, and the cost of the result.
struct BudgetReport {
  std::string unit;  ///< "bits" (average code bits) or "bytes" (a token and layer, average over layers)
  double budget = 0.0;
  double spent = 0.0;
  double mean_bits = 0.0;   ///< code bits, average over all channels of the quantized sides
  double mean_bytes = 0.0;  ///< bytes of a token, average over layers; exact sides and layers count two bytes a channel
  std::string metric;       ///< "nll" (nats a token, from the dump's output curvature), "relative_output" or
                            ///< "relative_residual" (squared, of a layer's outputs, and behind o_proj)
  double cost = 0.0;        ///< of the chosen plans, on the held-out tokens: sum over layers and sides
  double gap =
      0.0;  ///< cost is at most 1 + gap times that of the best choice among the same candidates (Lagrangian bound)
  std::int64_t tokens = 0;  ///< held out
};

struct BudgetDecision {
  std::vector<LayerPlan> plans;
  BudgetReport report;
};

/// Decides plans under one budget for all layers and both sides. Each side of each layer is tried at a ladder of sizes,
/// keys and values separately. The error of attention's output on the held-out tokens decides between sizes and, head
/// by head, between bases: keys in RoPE blocks or rotated as a whole, values in the score-weighted eigenbasis or
/// rotated as a whole, keys and values in the coordinates of klt. Without a budget every side gets its own bits
/// (SideOptions::bits), and the report states the cost.
/// @throws Error{usage} if the statistics hold no held-out tokens
BudgetDecision decide_with_budget(const StatsSource& source, const Options& options, const LayerDone& done);

/// One step of the ablation: the report of the same budget after one more ingredient was switched on.
struct AblationRow {
  std::string ingredient;
  BudgetReport report;
};
/// The method's ingredients switched on one after the other, from Block-GTQ as published to everything that `options`
/// says.
std::vector<AblationRow> ablate(const StatsSource& source, const Options& options);

}  // namespace kvq
