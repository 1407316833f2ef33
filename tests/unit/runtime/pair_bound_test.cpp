#include <kvq/runtime/kernels/quantize_write/pair_rows.h>
#include <kvq/runtime/pair_bound.h>
#include <kvq/solve/trellis_tables.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <vector>

using namespace kvq;

namespace {

TensorPlan plan_of(const std::vector<TrellisTaps>& taps) {
  TensorPlan plan;
  plan.coder = TrellisCoder{.bits = 2, .group_size = 128, .taps = taps};
  return plan;
}
TensorPlan shipped(int memory) { return plan_of(trellis_taps(2, memory, 128)); }

/// The search in integers of a row of t (y in 1/256), as packing.md (d) defines it, without codes.
/// @return  the largest difference from the cost of the reference state of what the search in pairs compares
double largest_cost(const IntegerSearch& search, const std::vector<int>& t) {
  const int m = search.memory(), states = 1 << 2 * m, reference = pair_reference(m);
  const auto window = [&](int state, int dropped) {
    return search.windows()[static_cast<std::size_t>(state + states * dropped)];
  };
  const auto tap = [&](int k, int bit) { return search.taps()[static_cast<std::size_t>(2 * k + bit)]; };
  std::vector<int> cost(static_cast<std::size_t>(states)), next = cost;
  const auto at = [&](int state) { return static_cast<std::size_t>(state); };
  int most = 0;
  for (std::size_t j = 0; j + static_cast<std::size_t>(m) < t.size(); ++j) {
    int gains[2] = {};
    for (int bit = 0; bit < 2; ++bit) {
      int sum = 0;
      for (int k = 0; k <= m; ++k) sum += t[j + static_cast<std::size_t>(k)] * tap(k, bit);
      gains[bit] = (sum + 8192) >> 14;
    }
    for (int state = 0; state < states; ++state) {
      const int code = state & 3, inner = state >> 2;
      const int gained = (code & 1 ? gains[0] : -gains[0]) + (code & 2 ? gains[1] : -gains[1]);
      int best = 0;
      for (int dropped = 0; dropped < 4; ++dropped) {
        const int reached = cost[at(inner + (dropped << 2 * (m - 1)))] + window(state, dropped) - gained;
        if (dropped == 0 || reached < best) best = reached;
        // What the code costs with those between it and the dropped one comes later.
        const int between = (window(state, 0) - window(state ^ (states - 4), 0)) / 2;
        most = std::max(most, std::abs(reached - (m == 1 ? 0 : between) - cost[at(reference)]));
      }
      next[at(state)] = best;
    }
    cost = next;
  }
  return most / static_cast<double>(search.unit());
}

}  // namespace

TEST_CASE("Costs of the shipped trellises fit the search in pairs, whatever the rows", "[runtime]") {
  const int memory = GENERATE(1, 2, 3);
  CAPTURE(memory);
  const IntegerSearch search(trellis_taps(2, memory, 128).at(0));
  const double bound = pair_cost_bound(search, pair_reference(memory)), room = pair_cost_room(search.unit());
  CAPTURE(bound, room);
  CHECK(bound < room);
  CHECK(pair_search_memory(shipped(memory), 3, 128) == memory);
  // Rows at the ends of their range come near the bound, which holds for all.
  std::mt19937 random(static_cast<unsigned>(memory));
  double most = 0.0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<int> t;
    for (int i = 0; i < 24; ++i)
      t.push_back(random() % 8 == 0 ? static_cast<int>(random() % 2305) - 1152
                  : random() % 2    ? IntegerSearch::kLargestY
                                    : -IntegerSearch::kLargestY);
    most = std::max(most, largest_cost(search, t));
  }
  CAPTURE(most);
  CHECK(most <= bound + 1.0);  // of roundings
  CHECK(most >= 0.7 * bound);
}

TEST_CASE("Rows that are not searched in pairs", "[runtime]") {
  const auto memory_of = [](auto change, int dim = 128) {
    TensorPlan plan = shipped(2);
    change(plan, std::get<TrellisCoder>(plan.coder));
    return pair_search_memory(plan, 2, dim);
  };
  CHECK(memory_of([](auto&, auto&) {}) == 2);
  CHECK(memory_of([](auto&, auto& coder) { coder.rule = ScaleRule::rms; }) == 2);
  CHECK(memory_of([](auto&, auto& coder) { coder.rule = ScaleRule::least_squares; }) == 0);
  CHECK(memory_of([](auto&, auto& coder) { coder.scale_type = ScaleType::bf16; }) == 0);
  CHECK(memory_of([](auto&, auto& coder) { coder.group_size = 64; }) == 0);
  CHECK(memory_of([](auto&, auto& coder) { coder.group_size = 64; }, 64) == 0);
  CHECK(memory_of([](auto&, auto& coder) { coder.taps.at(0).search = TrellisSearch::binary32; }) == 0);
  CHECK(memory_of([](auto&, auto& coder) { coder.taps.clear(); }) == 0);
  CHECK(memory_of([](auto& plan, auto&) { plan.centroids.emplace(); }) == 0);
  CHECK(memory_of([](auto& plan, auto&) { plan.coder = UniformCoder{}; }) == 0);
  CHECK(memory_of([](auto& plan, auto& coder) {
          coder = TrellisCoder{.bits = 3, .group_size = 128, .taps = trellis_taps(3, 2, 128)};
          static_cast<void>(plan);
        }) == 0);
  // Numbers of an artifact whose costs do not fit 16 bits.
  CHECK(memory_of([](auto&, auto& coder) {
          for (float& theta : coder.taps.at(0).theta) theta = theta < 0.0f ? -2.5f : 2.5f;
        }) == 0);
}

TEST_CASE("Mixed rows whose channels all have two bits are searched in pairs", "[runtime]") {
  TensorPlan plan = shipped(3);
  std::get<TrellisCoder>(plan.coder).group_size = 0;
  BitAllocation allocation;
  for (int head = 0; head < 2; ++head)
    for (int c = 0; c < 128; ++c) {
      allocation.channel_bits.push_back(2);
      allocation.channel_order.push_back(static_cast<std::uint16_t>(c));
    }
  plan.allocation = allocation;
  CHECK(pair_search_memory(plan, 2, 128) == 3);
  plan.allocation->segment_gain.assign(16, 1.0f);
  CHECK(pair_search_memory(plan, 2, 128) == 3);
  for (const float gain : {0x1p-15f, 0x1p15f}) {
    plan.allocation->segment_gain[9] = gain;  // of the second head's two bits
    CHECK(pair_search_memory(plan, 2, 128) == 0);
  }
  plan.allocation->segment_gain[9] = 1.0f;
  plan.allocation->channel_bits[255] = 1;
  CHECK(pair_search_memory(plan, 2, 128) == 0);
  CHECK(pair_search_memory(plan, 1, 128) == 3);
}
