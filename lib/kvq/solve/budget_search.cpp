#include <kvq/core/error.h>
#include <kvq/solve/budget_search.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

namespace kvq {

namespace {

/// Indices of the lower convex hull of a unit's choices, by rising size and falling cost.
std::vector<std::size_t> lower_hull(const std::vector<Choice>& choices) {
  std::vector<std::size_t> order(choices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tuple(choices[a].size, choices[a].cost, a) < std::tuple(choices[b].size, choices[b].cost, b);
  });
  std::vector<std::size_t> hull;
  for (const std::size_t i : order) {
    if (!hull.empty() && choices[i].cost >= choices[hull.back()].cost) continue;
    while (hull.size() >= 2) {
      const Choice &a = choices[hull[hull.size() - 2]], &b = choices[hull.back()], &c = choices[i];
      if ((a.cost - b.cost) * (c.size - b.size) > (b.cost - c.cost) * (b.size - a.size))
        break;  // b lies below the line a c
      hull.pop_back();
    }
    hull.push_back(i);
  }
  return hull;
}

struct Walk {
  const std::vector<std::vector<Choice>>& units;
  std::vector<std::vector<std::size_t>> hulls;
  std::vector<std::size_t> place;  ///< on each hull

  const Choice& at(std::size_t u, std::size_t i) const { return units[u][hulls[u][i]]; }
  /// Cost saved per unit of size by the next step of a unit; negative if there is none.
  double slope(std::size_t u) const {
    if (place[u] + 1 >= hulls[u].size()) return -1.0;
    const Choice &now = at(u, place[u]), &next = at(u, place[u] + 1);
    return (now.cost - next.cost) / (next.size - now.size);
  }
};

void tally(const std::vector<std::vector<Choice>>& units, BudgetResult& result) {
  result.size = result.cost = 0.0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    result.size += units[u][result.chosen[u]].size;
    result.cost += units[u][result.chosen[u]].cost;
  }
}

/// Moves one unit, or two units at once, to other choices as long as this lowers the cost within the budget.
void exchange(const std::vector<std::vector<Choice>>& units, double budget, BudgetResult& result) {
  const auto gain_of = [&](std::size_t u, std::size_t c) { return units[u][result.chosen[u]].cost - units[u][c].cost; };
  const auto growth_of = [&](std::size_t u, std::size_t c) {
    return units[u][c].size - units[u][result.chosen[u]].size;
  };
  const double slack = 1e-9 * std::max(1.0, budget);
  for (int round = 0; round < 1000; ++round) {
    double best = 1e-12 * std::max(1e-300, result.cost);
    std::size_t bu = 0, bc = 0, bw = 0, bd = 0;
    bool found = false;
    for (std::size_t u = 0; u < units.size(); ++u)
      for (std::size_t c = 0; c < units[u].size(); ++c)
        for (std::size_t w = u; w < units.size(); ++w)
          for (std::size_t d = 0; d < units[w].size(); ++d) {
            if (w == u && d != c) continue;
            const double gain = gain_of(u, c) + (w == u ? 0.0 : gain_of(w, d)),
                         growth = growth_of(u, c) + (w == u ? 0.0 : growth_of(w, d));
            if (gain <= best || result.size + growth > budget + slack) continue;
            best = gain;
            bu = u, bc = c, bw = w, bd = d;
            found = true;
          }
    if (!found) return;
    result.chosen[bu] = bc;
    result.chosen[bw] = bd;
    tally(units, result);
  }
}

}  // namespace

BudgetResult search_budget(const std::vector<std::vector<Choice>>& units, double budget) {
  Walk walk{units, {}, std::vector<std::size_t>(units.size(), 0)};
  double size = 0.0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    walk.hulls.push_back(lower_hull(units[u]));
    size += walk.at(u, 0).size;
  }
  const double slack = 1e-9 * std::max(1.0, budget);
  if (size > budget + slack)
    throw Error{ErrorKind::usage,
                fmt::format("budget: the smallest choices take {:.6g}, the budget is {:.6g}", size, budget),
                "raise the budget or lower --min-bits"};

  double price = 0.0;  // cost per size at which the walk stopped: the multiplier of the bound
  for (;;) {
    std::size_t best = units.size();
    for (std::size_t u = 0; u < units.size(); ++u)
      if (walk.slope(u) > 0.0 && (best == units.size() || walk.slope(u) > walk.slope(best))) best = u;
    if (best == units.size()) {
      price = 0.0;
      break;
    }
    const double step = walk.at(best, walk.place[best] + 1).size - walk.at(best, walk.place[best]).size;
    if (size + step > budget + slack) {
      price = walk.slope(best);
      break;
    }
    size += step;
    ++walk.place[best];
  }
  BudgetResult result;
  for (std::size_t u = 0; u < units.size(); ++u) result.chosen.push_back(walk.hulls[u][walk.place[u]]);
  tally(units, result);
  // Dual: min over choices of cost + price * (size - budget), unit by unit.
  result.bound = -price * budget;
  for (const auto& choices : units) {
    double least = std::numeric_limits<double>::infinity();
    for (const Choice& choice : choices) least = std::min(least, choice.cost + price * choice.size);
    result.bound += least;
  }
  exchange(units, budget, result);
  return result;
}

}  // namespace kvq
