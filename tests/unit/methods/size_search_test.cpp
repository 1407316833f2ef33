#include <kvq/methods/size_search.h>

#include "support/error_of.h"
#include "support/random_data.h"

#include <fmt/format.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <utility>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

LayerGeometry geometry(int head_dim = 128, int heads_of_each = 4) {
  return {.num_q_heads = heads_of_each,
          .num_kv_heads = 1,
          .head_dim = head_dim,
          .v_head_dim = head_dim,
          .softmax_scale = 1.0};
}

/// Words of linear rows with one scale.
SideFormat words(int count) { return {fmt::format("w{}n1", count), true}; }

/// Sizes of `least` to `most` words, with these costs or with costs that fall by half with each word.
SizedSide side_of(std::size_t layer, Side side, int least, int most, const LayerGeometry& of = geometry(),
                  double weight = 1.0) {
  SizedSide sized{.layer = layer, .side = side, .geometry = of, .choices = {}, .formats = {}};
  for (int count = least; count <= most; ++count) {
    sized.choices.push_back({static_cast<double>(count), weight * std::pow(2.0, -count)});
    sized.formats.push_back(words(count));
  }
  return sized;
}

double size_of(const std::vector<SizedSide>& sides, const ChosenSizes& found) {
  double size = 0.0;
  for (std::size_t s = 0; s < sides.size(); ++s) size += sides[s].choices.at(found.chosen.at(s)).size;
  return size;
}

/// Words of the keys and values of each layer.
std::map<std::size_t, std::pair<std::string, std::string>> pairs_of(const std::vector<SizedSide>& sides,
                                                                    const ChosenSizes& found) {
  std::map<std::size_t, std::pair<std::string, std::string>> pairs;
  for (std::size_t s = 0; s < sides.size(); ++s)
    (sides[s].side == Side::k ? pairs[sides[s].layer].first : pairs[sides[s].layer].second) =
        sides[s].formats.at(found.chosen[s]).name;
  return pairs;
}

/// Layers of keys and values with random sizes and costs.
std::vector<SizedSide> random_sides(test::Random& random, int most_layers) {
  std::vector<SizedSide> sides;
  for (int layer = random.integer(1, most_layers); layer > 0; --layer)
    for (const Side side : kSides) {
      SizedSide sized{.layer = sides.size() / 2, .side = side, .geometry = geometry(), .choices = {}, .formats = {}};
      const double score = std::exp(random.normal());
      for (int i = random.integer(1, 5); i > 0; --i) {
        const int count = random.integer(1, 6);
        sized.choices.push_back({static_cast<double>(count), score * std::pow(2.0, -count + 0.4 * random.normal())});
        sized.formats.push_back({words(count).name, random.integer(0, 9) > 0});
      }
      sides.push_back(std::move(sized));
    }
  return sides;
}

/// A random choice of the pairs of 1 to 6 words.
struct Kernels {
  explicit Kernels(test::Random& random) {
    for (int k = 1; k <= 6; ++k)
      for (int v = 1; v <= 6; ++v)
        if (random.integer(0, 2) == 0) names.insert({words(k).name, words(v).name});
    for (const auto& [k, v] : names)
      rows.push_back({.verb = KernelVerb::decode, .head_dim = 128, .k = k, .v = v, .heads = 4, .activation = "bf16"});
  }
  bool take(const SizedSide& k, std::size_t i, const SizedSide& v, std::size_t j) const {
    return k.formats[i].readable && v.formats[j].readable && names.contains({k.formats[i].name, v.formats[j].name});
  }
  std::set<std::pair<std::string, std::string>> names;
  std::vector<KernelRow> rows;
};

/// By plain loops over a layer's pairs: those that the kernels take, or all if they take none.
struct LayerPairs {
  std::vector<Choice> choices;
  bool tuned = false;
};
std::vector<LayerPairs> all_pairs(const std::vector<SizedSide>& sides, const Kernels& kernels) {
  std::vector<LayerPairs> layers;
  for (std::size_t s = 0; s < sides.size(); s += 2) {
    const SizedSide &k = sides[s], &v = sides[s + 1];
    LayerPairs tuned{.choices = {}, .tuned = true}, free;
    for (std::size_t i = 0; i < k.choices.size(); ++i)
      for (std::size_t j = 0; j < v.choices.size(); ++j) {
        const Choice both{k.choices[i].size + v.choices[j].size, k.choices[i].cost + v.choices[j].cost};
        free.choices.push_back(both);
        if (kernels.take(k, i, v, j)) tuned.choices.push_back(both);
      }
    layers.push_back(tuned.choices.empty() ? free : tuned);
  }
  return layers;
}

double least_cost(const std::vector<LayerPairs>& layers, double budget) {
  double best = HUGE_VAL;
  const std::function<void(std::size_t, double, double)> visit = [&](std::size_t layer, double size, double cost) {
    if (size > budget) return;
    if (layer == layers.size()) {
      best = std::min(best, cost);
      return;
    }
    for (const Choice& choice : layers[layer].choices) visit(layer + 1, size + choice.size, cost + choice.cost);
  };
  visit(0, 0.0, 0.0);
  return best;
}

double extreme(const std::vector<Choice>& choices, bool largest) {
  double size = choices.front().size;
  for (const Choice& choice : choices) size = largest ? std::max(size, choice.size) : std::min(size, choice.size);
  return size;
}

}  // namespace

TEST_CASE("A free target chooses what the search of each side chooses, bit for bit", "[methods]") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    INFO("seed " << seed);
    test::Random random(seed);
    const std::vector<SizedSide> sides = random_sides(random, 4);
    std::vector<std::vector<Choice>> units;
    double budget = 0.0;
    for (const SizedSide& side : sides) {
      units.push_back(side.choices);
      budget += extreme(side.choices, false) + random.integer(0, 3);
    }
    const BudgetResult expected = search_budget(units, budget);
    const ChosenSizes found = choose_sizes(sides, budget, {.target = Target::free});
    CHECK(found.chosen == expected.chosen);
    CHECK(found.cost == expected.cost);
    CHECK(found.bound == expected.bound);
    CHECK(found.target == TargetResult::unasked);
  }
}

TEST_CASE("The runtime's target is kept where a budget allows it, and no budget is exceeded", "[methods][property]") {
  std::map<TargetResult, int> seen;
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    INFO("seed " << seed);
    test::Random random(seed);
    const std::vector<SizedSide> sides = random_sides(random, 3);
    const Kernels kernels(random);
    double free_least = 0.0, free_most = 0.0, least = 0.0, most = 0.0;
    for (const SizedSide& side : sides)
      free_least += extreme(side.choices, false), free_most += extreme(side.choices, true);
    const std::vector<LayerPairs> layers = all_pairs(sides, kernels);
    for (const LayerPairs& layer : layers) least += extreme(layer.choices, false), most += extreme(layer.choices, true);
    const double budget = free_least + random.integer(0, static_cast<int>(free_most - free_least) + 2);
    const bool any = std::any_of(layers.begin(), layers.end(), [](const LayerPairs& layer) { return layer.tuned; });
    const TargetResult expected = !any                                 ? TargetResult::no_kernels
                                  : least > budget                     ? TargetResult::budget_too_low
                                  : most < std::min(budget, free_most) ? TargetResult::budget_too_high
                                                                       : TargetResult::kept;

    const ChosenSizes found = choose_sizes(sides, budget, {.target = Target::runtime}, kernels.rows);
    ++seen[found.target];
    CHECK(to_string(found.target) == std::string(to_string(expected)));
    CHECK(size_of(sides, found) <= budget);
    if (found.target != TargetResult::kept) {
      CHECK(found.chosen == choose_sizes(sides, budget, {.target = Target::free}).chosen);
      continue;
    }
    double cost = 0.0;
    for (std::size_t s = 0; s < sides.size(); ++s) cost += sides[s].choices[found.chosen[s]].cost;
    for (std::size_t s = 0; s < sides.size(); s += 2)
      CHECK((!layers[s / 2].tuned || kernels.take(sides[s], found.chosen[s], sides[s + 1], found.chosen[s + 1])));
    const double best = least_cost(layers, budget);
    CHECK(cost == Approx(found.cost));
    CHECK(cost >= best * (1 - 1e-12));
    CHECK(found.bound <= best * (1 + 1e-12));
    if (layers.size() == 1 && layers.front().tuned) CHECK(cost == Approx(best));
  }
  for (const TargetResult result :
       {TargetResult::no_kernels, TargetResult::kept, TargetResult::budget_too_low, TargetResult::budget_too_high})
    CHECK(seen[result] > 50);
}

TEST_CASE("The tuned kernels of this build decide which pairs of sizes are taken", "[methods]") {
  // Values weigh more, so keys get fewer words than any kernel takes.
  const std::vector<SizedSide> sides = {side_of(0, Side::k, 2, 18), side_of(0, Side::v, 2, 18, geometry(), 300.0),
                                        side_of(1, Side::k, 2, 18), side_of(1, Side::v, 2, 18, geometry(), 300.0)};
  const ChosenSizes free = choose_sizes(sides, 32, {.target = Target::free});
  CHECK(pairs_of(sides, free)[0] == std::pair<std::string, std::string>{"w4n1", "w12n1"});
  const ChosenSizes kept = choose_sizes(sides, 32, {.target = Target::runtime});
  CHECK(kept.target == TargetResult::kept);
  CHECK(size_of(sides, kept) == 32);
  CHECK(kept.cost > free.cost);
  for (const auto& [layer, pair] : pairs_of(sides, kept)) {
    INFO("layer " << layer);
    CHECK(pair == std::pair<std::string, std::string>{"w6n1", "w10n1"});
    CHECK(has_tuned_decode(geometry(), {pair.first, true}, {pair.second, true}, Activation::bf16));
  }
  CHECK(choose_sizes(sides, 27, {.target = Target::runtime}).target == TargetResult::budget_too_low);
  CHECK(choose_sizes(sides, 28, {.target = Target::runtime}).target == TargetResult::kept);
  CHECK(choose_sizes(sides, 40, {.target = Target::runtime}).target == TargetResult::kept);
  CHECK(choose_sizes(sides, 41, {.target = Target::runtime}).target == TargetResult::budget_too_high);
  CHECK(choose_sizes(sides, 99, {.target = Target::runtime}).chosen ==
        choose_sizes(sides, 99, {.target = Target::free}).chosen);
}

TEST_CASE("Shapes and rows without tuned kernels are not restricted", "[methods]") {
  const auto result = [](const LayerGeometry& of, const std::function<void(SizedSide&)>& change = {}) {
    std::vector<SizedSide> sides = {side_of(0, Side::k, 2, 18, of), side_of(0, Side::v, 2, 18, of)};
    for (SizedSide& side : sides)
      if (change) change(side);
    const ChosenSizes found = choose_sizes(sides, 16, {.target = Target::runtime});
    if (found.target == TargetResult::no_kernels)
      CHECK(found.chosen == choose_sizes(sides, 16, {.target = Target::free}).chosen);
    return found.target;
  };
  CHECK(result(geometry()) == TargetResult::kept);
  CHECK(result(geometry(64)) == TargetResult::no_kernels);
  CHECK(result(geometry(128, 8)) == TargetResult::kept);  // in two passes
  CHECK(result(geometry(128, 1)) == TargetResult::kept);
  CHECK(result(geometry(), [](SizedSide& side) { side.formats.clear(); }) == TargetResult::no_kernels);
  CHECK(result(geometry(), [](SizedSide& side) {
          for (SideFormat& format : side.formats) format.readable = false;
        }) == TargetResult::no_kernels);
}

TEST_CASE("Layers without tuned kernels, and sides alone, are chosen beside the others", "[methods]") {
  const LayerGeometry other = geometry(64);
  const std::vector<SizedSide> sides = {side_of(0, Side::k, 2, 18), side_of(0, Side::v, 2, 18, geometry(), 300.0),
                                        side_of(1, Side::k, 2, 18, other), side_of(1, Side::v, 2, 18, other, 300.0),
                                        side_of(2, Side::v, 2, 18, geometry(), 1.5)};
  const ChosenSizes found = choose_sizes(sides, 40, {.target = Target::runtime});
  CHECK(found.target == TargetResult::kept);
  CHECK(size_of(sides, found) == 40);
  const auto pairs = pairs_of(sides, found);
  CHECK(pairs.at(0).first == "w6n1");
  CHECK(pairs.at(1).first == "w4n1");
  CHECK(choose_sizes(std::vector{sides[4]}, 8, {.target = Target::runtime}).target == TargetResult::no_kernels);
}

TEST_CASE("Equal rows in all layers have one pair, which tuned kernels decode in each", "[methods]") {
  std::vector<SizedSide> sides = {side_of(0, Side::k, 2, 18), side_of(0, Side::v, 2, 18, geometry(), 300.0),
                                  side_of(1, Side::k, 2, 18), side_of(1, Side::v, 2, 18, geometry(), 900.0)};
  const ChosenSizes found = choose_sizes(sides, 32, {.uniform = true, .target = Target::runtime});
  CHECK(found.target == TargetResult::kept);
  CHECK(found.chosen == std::vector<std::size_t>{4, 8, 4, 8});  // w6 and w10
  const ChosenSizes free = choose_sizes(sides, 32, {.uniform = true, .target = Target::free});
  CHECK(free.chosen[0] == free.chosen[2]);
  CHECK(free.chosen[1] == free.chosen[3]);
  CHECK(free.cost < found.cost);
  for (std::size_t s : {2, 3}) sides[s].geometry = geometry(64);
  CHECK(choose_sizes(sides, 32, {.uniform = true, .target = Target::runtime}).target == TargetResult::no_kernels);
  sides[3].choices.pop_back();
  CHECK_THAT(test::error_text([&] { choose_sizes(sides, 32, {.uniform = true, .target = Target::runtime}); }),
             Contains("--uniform-layout"));
}
