#include <kvq/plan/cache_layout.h>
#include <kvq/solve/bit_budget.h>
#include <kvq/solve/budget_search.h>

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

using namespace kvq;
using Bits = std::vector<std::uint8_t>;

namespace {

/// Random scores, some of them equal or zero.
std::vector<double> any_scores(int most_blocks) {
  const auto count = static_cast<std::size_t>(*rc::gen::inRange(1, most_blocks + 1));
  return *rc::gen::container<std::vector<double>>(
      count, rc::gen::oneOf(rc::gen::map(rc::gen::inRange(0, 9), [](int n) { return static_cast<double>(n); }),
                            rc::gen::map(rc::gen::inRange(-8000, 8000), [](int n) { return std::exp(n * 1e-3); })));
}

/// A falling and convex law: the sum that remains of falling gains.
RateLaw any_law() {
  auto gains = *rc::gen::container<std::vector<double>>(
      8, rc::gen::map(rc::gen::inRange(1, 1000), [](int n) { return n * 1e-3; }));
  std::sort(gains.rbegin(), gains.rend());
  RateLaw law{};
  for (std::size_t b = 8; b-- > 0;) law[b] = law[b + 1] + gains[b];
  return law;
}

/// Algorithm 1 as the header defines it, in plain loops; on a tie the lowest index wins.
Bits naive_greedy(const std::vector<double>& scores, int budget, int least, int most, const RateLaw& law) {
  Bits bits(scores.size(), static_cast<std::uint8_t>(least));
  for (int left = budget - least * static_cast<int>(scores.size()); left > 0; --left) {
    std::size_t best = scores.size();
    double gain = 0.0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double next = bits[i] < most ? scores[i] * (law[bits[i]] - law[bits[i] + 1u]) : 0.0;
      if (next > gain) {
        gain = next;
        best = i;
      }
    }
    if (best == scores.size()) break;  // all remaining scores are zero
    ++bits[best];
  }
  return bits;
}

}  // namespace

TEST_CASE("Greedy allocation is Algorithm 1: the same bits, with ties to the lowest index", "[solve][property]") {
  rc::prop("any scores, limits, budget and law", [] {
    const std::vector<double> scores = any_scores(30);
    const int least = *rc::gen::inRange(0, 5), most = *rc::gen::inRange(least, 9),
              count = static_cast<int>(scores.size());
    const int budget = *rc::gen::inRange(count * least, count * most + 1);
    const RateLaw law = *rc::gen::inRange(0, 2) == 0 ? paper_law() : any_law();
    const Bits found = greedy_allocation(scores, budget, least, most, law),
               expected = naive_greedy(scores, budget, least, most, law);
    RC_ASSERT(std::accumulate(found.begin(), found.end(), 0) == budget);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      RC_ASSERT(found[i] >= least);
      RC_ASSERT(found[i] <= most);
      if (scores[i] > 0.0) RC_ASSERT(found[i] == expected[i]);
    }
    // The bits of scores that are zero differ by at most one.
    int low = 9, high = 0;
    for (std::size_t i = 0; i < scores.size(); ++i)
      if (scores[i] == 0.0) low = std::min<int>(low, found[i]), high = std::max<int>(high, found[i]);
    RC_ASSERT(high <= low + 1);
  });
}

TEST_CASE("Greedy allocation is optimal: no other widths of the same sum have a smaller J", "[solve][property]") {
  rc::prop("few blocks, all allocations", [] {
    const std::vector<double> scores = any_scores(5);
    const int least = *rc::gen::inRange(0, 3), most = *rc::gen::inRange(least, 6),
              count = static_cast<int>(scores.size());
    const int budget = *rc::gen::inRange(count * least, count * most + 1);
    const RateLaw law = *rc::gen::inRange(0, 2) == 0 ? paper_law() : any_law();
    double best = HUGE_VAL;
    Bits bits(scores.size(), static_cast<std::uint8_t>(least));
    for (;;) {
      if (std::accumulate(bits.begin(), bits.end(), 0) == budget)
        best = std::min(best, allocation_objective(scores, bits, law));
      std::size_t at = 0;
      while (at < bits.size() && bits[at] == most) bits[at++] = static_cast<std::uint8_t>(least);
      if (at == bits.size()) break;
      ++bits[at];
    }
    const double found = allocation_objective(scores, greedy_allocation(scores, budget, least, most, law), law);
    RC_ASSERT(std::abs(found - best) <= 1e-12 * (1.0 + best));
  });
}

TEST_CASE("A byte budget is never exceeded, and more bytes never cost more", "[solve][property]") {
  rc::prop("any scores", [] {
    const std::vector<double> scores = any_scores(24);
    RowBudget budget{
        .scale_bytes = *rc::gen::element(2, 4),
        .index_bytes = *rc::gen::inRange(0, 3),
        .channels_per_block = *rc::gen::inRange(1, 4),
        .min_bits = *rc::gen::inRange(0, 3),
        .max_bits = *rc::gen::element(4, 8),
    };
    const auto bytes = [&](Bits blocks) {
      std::sort(blocks.rbegin(), blocks.rend());
      Bits channels;
      for (const std::uint8_t width : blocks)
        channels.insert(channels.end(), static_cast<std::size_t>(budget.channels_per_block), width);
      return mixed_row_layout(channels.data(), static_cast<int>(channels.size()), budget.scale_bytes,
                              budget.index_bytes)
          .row_bytes;
    };
    const int least = bytes(Bits(scores.size(), static_cast<std::uint8_t>(budget.min_bits)));
    double last = HUGE_VAL;
    for (int extra = 0; extra < 12; extra += *rc::gen::inRange(1, 4)) {
      budget.row_bytes = least + extra;
      const Bits bits = byte_allocation(scores, budget);
      RC_ASSERT(bytes(bits) <= budget.row_bytes);
      const double objective = allocation_objective(scores, bits);
      RC_ASSERT(objective <= last * (1 + 1e-12));
      last = objective;
    }
  });
}

TEST_CASE("A budget search is within its budget and between bound and brute force", "[solve][property]") {
  rc::prop("few units", [] {
    const auto integer = [](int low, int high) {
      return rc::gen::map(rc::gen::inRange(low, high), [](int n) { return static_cast<double>(n); });
    };
    const auto choice = rc::gen::map(rc::gen::pair(integer(0, 9), integer(0, 20)),
                                     [](std::pair<double, double> p) { return Choice{p.first, p.second}; });
    const auto count = static_cast<std::size_t>(*rc::gen::inRange(1, 5));
    std::vector<std::vector<Choice>> units;
    for (std::size_t u = 0; u < count; ++u)
      units.push_back(
          *rc::gen::container<std::vector<Choice>>(static_cast<std::size_t>(*rc::gen::inRange(1, 5)), choice));
    double least = 0.0, best = HUGE_VAL;
    for (const auto& unit : units)
      least += std::min_element(unit.begin(), unit.end(), [](const Choice& a, const Choice& b) {
                 return a.size < b.size;
               })->size;
    const double budget = least + *rc::gen::inRange(0, 25);
    std::vector<std::size_t> at(count, 0);
    for (;;) {
      double size = 0.0, cost = 0.0;
      for (std::size_t u = 0; u < count; ++u) size += units[u][at[u]].size, cost += units[u][at[u]].cost;
      if (size <= budget) best = std::min(best, cost);
      std::size_t u = 0;
      while (u < count && ++at[u] == units[u].size()) at[u++] = 0;
      if (u == count) break;
    }
    const BudgetResult result = search_budget(units, budget);
    double size = 0.0, cost = 0.0;
    for (std::size_t u = 0; u < count; ++u)
      size += units[u].at(result.chosen.at(u)).size, cost += units[u].at(result.chosen.at(u)).cost;
    RC_ASSERT(size <= budget);
    RC_ASSERT(std::abs(size - result.size) <= 1e-9);
    RC_ASSERT(std::abs(cost - result.cost) <= 1e-9);
    RC_ASSERT(cost >= best - 1e-9);
    RC_ASSERT(result.bound <= best + 1e-9);
  });
}
