#include <kvq/solve/budget_search.h>

#include "support/error_of.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using Units = std::vector<std::vector<Choice>>;

namespace {

/// The smallest cost of all selections within the budget.
double brute_force(const Units& units, double budget) {
  double best = HUGE_VAL;
  const std::function<void(std::size_t, double, double)> visit = [&](std::size_t unit, double size, double cost) {
    if (size > budget) return;
    if (unit == units.size()) {
      best = std::min(best, cost);
      return;
    }
    for (const Choice& choice : units[unit]) visit(unit + 1, size + choice.size, cost + choice.cost);
  };
  visit(0, 0.0, 0.0);
  return best;
}

double smallest_size(const Units& units) {
  double sum = 0.0;
  for (const auto& unit : units)
    sum += std::min_element(unit.begin(), unit.end(), [](const Choice& a, const Choice& b) {
             return a.size < b.size;
           })->size;
  return sum;
}

Units random_units(test::Random& random, int most_units, int most_choices, bool falling) {
  Units units(static_cast<std::size_t>(random.integer(1, most_units)));
  for (auto& unit : units) {
    const double score = std::exp(random.normal());
    for (int i = random.integer(1, most_choices); i > 0; --i) {
      const double size = random.integer(1, 12);
      unit.push_back(
          {size, falling ? score * std::pow(2.0, -size) * std::exp(0.3 * random.normal()) : random.uniform()});
    }
  }
  return units;
}

/// The largest difference of costs within one unit, which bounds the cost that one step of the search can leave.
double largest_step(const Units& units) {
  double largest = 0.0;
  for (const auto& unit : units) {
    const auto [low, high] =
        std::minmax_element(unit.begin(), unit.end(), [](const Choice& a, const Choice& b) { return a.cost < b.cost; });
    largest = std::max(largest, high->cost - low->cost);
  }
  return largest;
}

void check_consistent(const Units& units, double budget, const BudgetResult& result) {
  REQUIRE(result.chosen.size() == units.size());
  double size = 0.0, cost = 0.0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    REQUIRE(result.chosen[u] < units[u].size());
    size += units[u][result.chosen[u]].size;
    cost += units[u][result.chosen[u]].cost;
  }
  CHECK(result.size == Approx(size).epsilon(1e-12));
  CHECK(result.cost == Approx(cost).epsilon(1e-12));
  CHECK(size <= budget);
  CHECK(result.bound <= result.cost * (1 + 1e-12) + 1e-15);
}

}  // namespace

TEST_CASE("Small searches: within the budget, above the bound, and as near to the optimum as the bound says",
          "[solve][budget]") {
  test::Random random(3);
  int optimal = 0, searches = 0;
  for (int round = 0; round < 600; ++round) {
    const Units units = random_units(random, 5, 5, round % 2 == 0);
    const double budget = smallest_size(units) + random.integer(0, 30);
    const BudgetResult result = search_budget(units, budget);
    INFO("round " << round << ", budget " << budget);
    check_consistent(units, budget, result);
    const double best = brute_force(units, budget), slack = 1e-12 * (1.0 + best);
    CHECK(result.bound <= best + slack);
    CHECK(result.cost >= best - slack);
    CHECK(result.cost - best <= result.cost - result.bound + slack);
    CHECK(result.cost - result.bound <=
          largest_step(units) + slack);  // the dual leaves at most one step of one unit undone
    optimal += result.cost <= best + slack ? 1 : 0;
    ++searches;
  }
  CHECK(optimal > searches * 8 / 10);
}

TEST_CASE("No single exchange within the budget improves the result", "[solve][budget]") {
  test::Random random(4);
  for (int round = 0; round < 300; ++round) {
    const Units units = random_units(random, 12, 6, round % 2 == 0);
    const double budget = smallest_size(units) + random.integer(0, 60);
    const BudgetResult result = search_budget(units, budget);
    check_consistent(units, budget, result);
    for (std::size_t u = 0; u < units.size(); ++u)
      for (const Choice& other : units[u]) {
        const Choice& now = units[u][result.chosen[u]];
        const bool better = other.cost < now.cost * (1 - 1e-9) && result.size - now.size + other.size <= budget;
        CHECK_FALSE(better);
      }
  }
}

TEST_CASE("Where the budget ends on a corner of the hulls, the search is exact and says so", "[solve][budget]") {
  test::Random random(6);
  int corners = 0;
  for (int round = 0; round < 200; ++round) {
    // Convex units whose steps have one size and different gains: every whole number of steps is a corner of the hull.
    Units units(static_cast<std::size_t>(random.integer(1, 5)));
    for (auto& unit : units) {
      double cost = 10.0, gain = random.uniform(0.5, 3.0);
      for (int b = 1; b <= 4; ++b) {
        unit.push_back({static_cast<double>(b), cost});
        cost -= gain;
        gain *= random.uniform(0.3, 0.9);
      }
    }
    const double budget = static_cast<double>(units.size()) + random.integer(0, 3 * static_cast<int>(units.size()));
    const BudgetResult result = search_budget(units, budget);
    check_consistent(units, budget, result);
    CHECK(result.cost == Approx(brute_force(units, budget)).epsilon(1e-12));
    CHECK(result.bound == Approx(result.cost).epsilon(1e-9));
    ++corners;
  }
  CHECK(corners == 200);
}

TEST_CASE("With room for everything each unit takes its cheapest choice, with the smallest of equal ones",
          "[solve][budget]") {
  const Units units = {{{1, 5}, {2, 3}, {4, 3}, {8, 4}}, {{7, 1}, {3, 2}}, {{5, 0}}};
  const BudgetResult result = search_budget(units, 1000.0);
  check_consistent(units, 1000.0, result);
  CHECK(result.cost == 4.0);
  CHECK(result.bound == Approx(4.0).epsilon(1e-12));
  CHECK(result.chosen[1] == 0);
  CHECK(result.size == Approx(2 + 7 + 5).margin(2.0));
}

TEST_CASE("Choices below the hull's reach are found by exchange: unequal sizes that fill the budget",
          "[solve][budget]") {
  // Choices 1 and 10 are on the hull. The middle choice fits the budget, the last choice does not.
  const Units units = {{{1, 10.0}, {5, 6.0}, {10, 1.0}}};
  const BudgetResult result = search_budget(units, 6.0);
  check_consistent(units, 6.0, result);
  CHECK(result.chosen == std::vector<std::size_t>{1});
  CHECK(result.bound == Approx(10.0 - 5.0).epsilon(1e-9));  // the line from (1, 10) to (10, 1) at 6
}

TEST_CASE("The smallest choices alone may be all that fits", "[solve][budget]") {
  const Units units = {{{2.5, 9}, {4, 1}}, {{4, 1}, {1.5, 7}}};
  const BudgetResult result = search_budget(units, 4.0);
  CHECK(result.chosen == std::vector<std::size_t>{0, 1});
  CHECK(result.size == 4.0);
  CHECK(result.cost == 16.0);
}

TEST_CASE("A budget below the smallest choices is refused with their size", "[solve][budget]") {
  const Units units = {{{20, 9}, {40, 1}}, {{17, 1}, {170, 0}}};
  CHECK_THAT(test::error_text([&] { search_budget(units, 36.0); }), StartsWith("usage: ") && Contains("37"));
  CHECK(test::error_text([&] { search_budget(units, 37.0); }) == "no error");
}

TEST_CASE("Hundreds of units with tens of choices", "[solve][budget]") {
  test::Random random(8);
  Units units(288);
  for (auto& unit : units) {
    const double score = std::exp(2.0 * random.normal());
    for (int b = 0; b < 24; ++b) {
      const double size = 1.0 + 0.25 * b;
      unit.push_back({size, score * std::pow(4.0, -size) * std::exp(0.1 * random.normal())});
    }
  }
  const double budget = 3.0 * 288;
  const BudgetResult result = search_budget(units, budget);
  check_consistent(units, budget, result);
  CHECK(result.cost <= result.bound * 1.01);
  CHECK(result.size > budget - 1.0);
}
