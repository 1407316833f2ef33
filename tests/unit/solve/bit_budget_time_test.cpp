#include <kvq/solve/bit_budget.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <vector>

using namespace kvq;

TEST_CASE("All problems of a model take milliseconds", "[solve][bits]") {
  constexpr int kLayers = 36, kHeads = 8, kBlocks = 64;
  std::vector<std::vector<double>> problems;
  for (int i = 0; i < kLayers * kHeads; ++i) {
    problems.push_back(test::gaussian_double(kBlocks, static_cast<std::uint64_t>(i) + 1000, 2.0));
    for (double& score : problems.back()) score = std::exp(score);
  }
  double best = HUGE_VAL;
  int total = 0;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (const auto& scores : problems) {
      const auto bits = greedy_allocation(scores, total_bits(3.0, kBlocks), 1, 8);
      total += std::accumulate(bits.begin(), bits.end(), 0);
    }
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  CHECK(total == 5 * kLayers * kHeads * kBlocks * 3);
  std::cout << "bit allocation of " << kLayers * kHeads << " heads of " << kBlocks << " blocks: " << best << " ms\n";
  CHECK(best < 60.0);
}
