#pragma once

#include <kvq/methods/size_search.h>

#include <cstdint>
#include <string>

namespace kvq {

/// How a budget over layers and sides was spent, and the cost of the result.
struct BudgetReport {
  std::string unit;  ///< "bits" (average code bits) or "bytes" (a token and layer, average over layers)
  double budget = 0.0;
  double spent = 0.0;
  double mean_bits = 0.0;   ///< code bits, average over all channels of the coded sides
  double mean_bytes = 0.0;  ///< bytes of a token, average over layers; exact sides and layers count two bytes a channel
  std::string metric;       ///< "nll" (nats a token, from the dump's output curvature), "relative_output" or
                            ///< "relative_residual" (squared, of a layer's outputs, behind o_proj)
  double cost = 0.0;        ///< of the chosen plans, on the held-out tokens: sum over layers and sides
  double gap =
      0.0;  ///< cost is at most 1 + gap times that of the best choice among the same candidates (Lagrangian bound)
  std::int64_t tokens = 0;  ///< held out
  TargetResult target = TargetResult::unasked;
  double free_cost = 0.0;  ///< if the target is kept: what `cost` would be with Target::free
};

}  // namespace kvq
