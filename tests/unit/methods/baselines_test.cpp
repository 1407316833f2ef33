#include <kvq/methods/method.h>
#include <kvq/plan/rotation.h>

#include "support/decide.h"
#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <set>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

namespace {

LayerActivations layer_of(int dim, int v_dim) {
  return test::make_layer({.head_dim = dim, .v_head_dim = v_dim, .lengths = {50}});
}

}  // namespace

TEST_CASE("SAW-INT4 rotates keys by blocks of at most 128 and codes tokens in four bits", "[methods]") {
  for (const auto& [dim, order] : {std::pair{64, 64}, {80, 16}, {96, 32}, {128, 128}, {256, 128}}) {
    INFO("head_dim " << dim);
    const LayerPlan plan = test::decide_one(layer_of(dim, 32), test::options_of("saw-int4"));
    CHECK(plan.k.rotation.kind == RotationKind::block_hadamard);
    CHECK(plan.k.rotation.order == order);
    CHECK(plan.k.rotation.signs.empty());
    CHECK(plan.v->rotation.kind == RotationKind::identity);
    CHECK(std::get<UniformCoder>(plan.k.coder) ==
          UniformCoder{.bits = 4, .group_size = dim});  // one scale and minimum a row
    CHECK(plan.k.clip_ratio == std::vector<double>{1.0, 1.0});
  }
  CHECK(test::options_of("saw-int4").windows == Windows{});
}

TEST_CASE("SAW-INT4 takes another order, values and random signs, and refuses an order that does not fit",
          "[methods]") {
  const LayerPlan plan = test::decide_one(layer_of(64, 32), test::options_of("saw-int4", [](Options& o) {
                                            o.hadamard_order = 16;
                                            o.v.hadamard = true;
                                            o.random_signs = true;
                                          }));
  CHECK(plan.k.rotation.order == 16);
  CHECK(plan.v->rotation.order == 16);
  CHECK(plan.k.rotation.signs.size() == 128);
  CHECK(plan.v->rotation.signs.size() == 64);
  for (const int order : {24, 128})
    CHECK_THAT(test::error_text([&] {
                 test::decide_one(layer_of(64, 32),
                                  test::options_of("saw-int4", [&](Options& o) { o.hadamard_order = order; }));
               }),
               StartsWith("usage: ") && Contains(std::to_string(order)));
}

TEST_CASE("QuaRot rotates both sides by the largest blocks", "[methods]") {
  const LayerPlan plan = test::decide_one(layer_of(256, 96), test::options_of("quarot"));
  CHECK(plan.k.rotation.order == 256);
  CHECK(plan.v->rotation.order == 32);
  CHECK(plan.k.rotation.kind == RotationKind::block_hadamard);
  CHECK(plan.v->rotation.kind == RotationKind::block_hadamard);
}

TEST_CASE("The plain method rotates nothing", "[methods]") {
  const LayerPlan plan = test::decide_one(layer_of(64, 32), test::options_of("plain"));
  CHECK(plan.k.rotation.kind == RotationKind::identity);
  CHECK(plan.v->rotation.kind == RotationKind::identity);
  CHECK(plan.k.error->before == plan.k.error->after);
}

TEST_CASE("Random rotations and signs depend on seed, layer, head and side, and on nothing else", "[methods]") {
  const auto rotation = [](const std::string& method, std::uint64_t seed, int layer) {
    const LayerActivations activations =
        test::make_layer({.layer = layer, .head_dim = 32, .v_head_dim = 32, .lengths = {40}, .seed = seed + 17});
    return test::decide_one(activations, test::options_of(method, [&](Options& o) {
                              o.seed = seed;
                              o.random_signs = true;
                            }));
  };
  const auto halves = [](const auto& both, std::set<std::vector<double>>& into) {
    const auto middle = both.begin() + static_cast<std::ptrdiff_t>(both.size() / 2);
    into.insert(std::vector<double>(both.begin(), middle));
    into.insert(std::vector<double>(middle, both.end()));
  };
  std::set<std::vector<double>> seen;
  for (const std::uint64_t seed : {0, 1})
    for (const int layer : {0, 1}) {
      const LayerPlan haar = rotation("random", seed, layer), signs = rotation("quarot", seed, layer);
      CHECK(haar.k.rotation.matrix == rotation("random", seed, layer).k.rotation.matrix);
      halves(haar.k.rotation.matrix, seen);
      halves(haar.v->rotation.matrix, seen);
      halves(signs.k.rotation.signs, seen);
      halves(signs.v->rotation.signs, seen);
    }
  CHECK(seen.size() == 2 * 2 * 2 * 2 * 2);
}
