#pragma once

#include <kvq/methods/options.h>
#include <kvq/plan/serving.h>
#include <kvq/solve/budget_search.h>

#include <cstddef>
#include <span>
#include <vector>

namespace kvq {

/// One side of a layer: the sizes that were tried.
struct SizedSide {
  std::size_t layer = 0;
  Side side = Side::k;
  LayerGeometry geometry = {};
  std::vector<Choice> choices;
  std::vector<SideFormat> formats;  ///< of the rows, per choice; empty: rows of which no kernel is asked
};

/// What `--target runtime` came to. Of layers with budgets of their own the largest counts.
enum class TargetResult {
  unasked,         ///< the target is free, or no budget was spent
  no_kernels,      ///< no tuned kernel decodes rows of any size that was tried, so nothing is restricted
  kept,            ///< all layers that can have rows for tuned kernels have such rows
  budget_too_low,  ///< the smallest rows of tuned kernels do not fit into the budget, so nothing is restricted
  budget_too_high  ///< the largest rows of tuned kernels leave a part of the budget, so nothing is restricted
};
const char* to_string(TargetResult result);

struct ChosenSizes {
  std::vector<std::size_t> chosen;  ///< per side, an index into its choices
  double cost = 0.0;                ///< sum of the chosen choices
  double bound = 0.0;               ///< no selection with the same restriction costs less, see BudgetResult
  TargetResult target = TargetResult::unasked;
};

/// How sizes of sides depend on each other.
struct SizeRules {
  bool uniform = false;  ///< the same choice for the keys of all layers, and for their values
  Target target = Target::free;
};

/// Chooses a size for each side within one budget (search_budget()). With Target::runtime, keys and values of a layer
/// are chosen together, from the pairs of sizes that a tuned kernel decodes with bfloat16 activations. Layers without
/// such a pair are free. All layers are, if the pairs cannot spend the budget: it is never exceeded, and what other
/// rows could use of it is not left.
/// @param sides  ascending layers; of a layer the keys first
/// @param tuned  the kernels
/// @throws Error{usage} if the smallest choices do not fit
ChosenSizes choose_sizes(std::span<const SizedSide> sides, double budget, const SizeRules& rules,
                         std::span<const KernelRow> tuned = kernel_rows());

}  // namespace kvq
