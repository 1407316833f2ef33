#include <kvq/solve/clip_search.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <set>

using namespace kvq;

namespace {

constexpr std::size_t kRows = 37;

std::vector<float> random_weights(std::uint64_t seed) {
  std::vector<float> weights = test::gaussian(kRows, seed);
  for (float& weight : weights) weight = std::abs(weight);
  return weights;
}

}  // namespace

TEST_CASE("The clip search finds the best ratio of the grid, over heads together", "[solve]") {
  std::set<int> winners;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    const auto head = [&](std::uint64_t number) {
      RotatedData data{.dim = 64, .rows = test::gaussian(kRows * 64, number)};
      if (seed % 2 == 0) data.weights = random_weights(number);
      if (seed % 3 == 1) data.shrink_weight = 3.0;
      return data;
    };
    std::vector<RotatedData> heads = {head(seed)};
    if (seed % 3 == 0) heads.push_back(head(seed + 50));
    const UniformCoder coder{.bits = 1 + static_cast<int>(seed % 4), .group_size = seed % 2 == 0 ? 64 : 32};
    ClipChoice best{0.0, HUGE_VAL};
    for (int percent = 85; percent <= 100; ++percent) {
      double cost = 0.0;
      for (const RotatedData& data : heads) cost += clip_cost(data, RowCodec(coder, percent / 100.0, data.dim));
      if (cost <= best.cost) best = {percent / 100.0, cost};
    }
    const ClipChoice found = search_clip(heads, coder, cpu_backend());
    INFO("seed " << seed);
    CHECK(found.ratio == Approx(best.ratio).margin(1e-12));
    CHECK(found.cost == Approx(best.cost).epsilon(1e-12));
    winners.insert(static_cast<int>(std::lround(100 * best.ratio)));
  }
  CHECK(winners.size() > 3);  // the search chose between several candidates
}

TEST_CASE("Clip ratios that cost the same go to the larger one", "[solve]") {
  const RotatedData constant{.dim = 16, .rows = std::vector<float>(16 * 4, 1.0f)};
  const ClipChoice found =
      search_clip(std::span(&constant, 1), UniformCoder{.bits = 2, .group_size = 16}, cpu_backend());
  CHECK(found.ratio == 1.0);
  CHECK(found.cost == 0.0);
}
