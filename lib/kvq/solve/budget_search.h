#pragma once

#include <cstddef>
#include <vector>

namespace kvq {

/// One way to store a unit (a layer's keys, or its values): its size and its cost.
struct Choice {
  double size = 0.0;  ///< bits or bytes
  double cost = 0.0;
};

struct BudgetResult {
  std::vector<std::size_t> chosen;  ///< per unit, an index into its choices
  double size = 0.0, cost = 0.0;
  double bound = 0.0;  ///< no selection within the budget costs less (Lagrangian dual)
};

/// Picks one choice per unit with a total size of at most `budget` and a small total cost: first by a walk along the
/// units' lower convex hulls, then by exchanges of one or two choices. The dual bound of the walk limits the distance
/// from the optimum.
/// @throws Error{usage} if the smallest choices do not fit, naming their size
BudgetResult search_budget(const std::vector<std::vector<Choice>>& units, double budget);

}  // namespace kvq
