#pragma once

#include <cstddef>
#include <vector>

namespace kvq {

/// One way to store a unit (a layer's keys, or its values): what it takes and what it costs.
struct Choice {
  double size = 0.0;  ///< bits or bytes
  double cost = 0.0;
};

struct BudgetResult {
  std::vector<std::size_t> chosen;  ///< per unit, an index into its choices
  double size = 0.0, cost = 0.0;
  double bound = 0.0;  ///< no selection within the budget costs less (Lagrangian dual)
};

/// One choice per unit, total size at most `budget`, total cost as small as a walk along the units' lower convex hulls
/// finds, then improved by single exchanges. The dual bound of the same walk says how far from optimal that can be.
/// @throws Error{usage} if not even the smallest choices fit, naming their size
BudgetResult search_budget(const std::vector<std::vector<Choice>>& units, double budget);

}  // namespace kvq
