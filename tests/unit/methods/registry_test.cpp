// Each test loops over the registry of methods, so a new method is tested when it is added.

#include <kvq/compute/parallel.h>
#include <kvq/methods/method.h>
#include <kvq/plan/baseline.h>

#include "support/compare.h"
#include "support/decide.h"
#include "support/error_of.h"
#include "support/same_artifact.h"

#include <catch2/catch.hpp>

using namespace kvq;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using test::LayerSpec;

namespace {

struct Shape {
  const char* name;
  LayerSpec spec;
};

const Shape kShapes[] = {
    {"64", {.head_dim = 64, .v_head_dim = 64, .lengths = {40, 1, 23}, .outliers = true}},
    {"80 and 48", {.head_dim = 80, .v_head_dim = 48, .lengths = {40, 1, 23}, .outliers = true}},
    {"96 and 128", {.head_dim = 96, .v_head_dim = 128, .lengths = {40, 1, 23}, .dtype = DType::bf16, .outliers = true}},
    {"128 and 64, one head",
     {.num_q_heads = 3, .num_kv_heads = 1, .head_dim = 128, .v_head_dim = 64, .lengths = {61}, .outliers = true}},
    {"256 and 96", {.num_q_heads = 2, .num_kv_heads = 2, .head_dim = 256, .v_head_dim = 96, .lengths = {61}}},
    {"64 without values",
     {.num_q_heads = 4, .num_kv_heads = 1, .head_dim = 64, .lengths = {61}, .has_values = false, .outliers = true}},
};

void for_each_side(const LayerPlan& plan, const std::function<void(const TensorPlan&, Side, int)>& body) {
  body(plan.k, Side::k, plan.geometry.head_dim);
  if (plan.v) body(*plan.v, Side::v, plan.geometry.v_head_dim);
}

/// Channel means of one head of the dump.
std::vector<float> channel_means(const ActivationTensor& tensor, int head) {
  std::vector<float> rows(static_cast<std::size_t>(tensor.tokens * tensor.dim));
  tensor.load_head(head, 0, tensor.tokens, rows.data());
  std::vector<float> means;
  for (int channel = 0; channel < tensor.dim; ++channel) {
    double sum = 0.0;
    for (std::int64_t t = 0; t < tensor.tokens; ++t)
      sum += static_cast<double>(rows[static_cast<std::size_t>(t * tensor.dim + channel)]);
    means.push_back(static_cast<float>(sum / static_cast<double>(tensor.tokens)));
  }
  return means;
}

}  // namespace

TEST_CASE("Every method plans every shape: valid, orthogonal, the same for any number of threads", "[methods]") {
  for (const Shape& shape : kShapes)
    for (const Method& method : methods()) {
      INFO(method.name << ", head_dim " << shape.name);
      const LayerActivations layer = test::make_layer(shape.spec);
      const Options options = test::options_of(method.name, [](Options& o) { o.seed = 3; });
      const LayerStats stats = test::stats_for(layer, options, 40);
      const auto decided = [&](int threads) {
        const ThreadLimit limit(threads);
        return method.decide(test::MemoryStats({stats}), options, {}).plans.at(0);
      };
      const LayerPlan plan = decided(1);
      CHECK(test::error_text([&] { validate(plan); }) == "no error");
      CHECK(plan.geometry == layer.geometry);
      CHECK(plan.v.has_value() == layer.v.has_value());
      for_each_side(plan, [&](const TensorPlan& side, Side which, int dim) {
        INFO("side " << name(which));
        CHECK(orthogonality_error(side.rotation, dim) < 1e-6);
        REQUIRE(side.error);
        CHECK(side.error->before > 0.0);
        CHECK(side.error->after > 0.0);
        CHECK(side.error->after < 1.0);
      });
      test::check_equal(decided(2), plan);
    }
}

TEST_CASE("The error that a plan claims is the one that the codec makes", "[methods]") {
  for (const Method& method : methods()) {
    INFO(method.name);
    const LayerActivations layer =
        test::make_layer({.head_dim = 64, .v_head_dim = 32, .lengths = {50, 14}, .seed = 4, .outliers = true});
    const Options options = test::options_of(method.name, [](Options& o) { o.k.center = true; });
    if (options.budget_bits) continue;  // kvq: joint_budget_test.cpp tests it
    const LayerStats stats = test::stats_for(layer, options);
    const LayerPlan plan = method.decide(test::MemoryStats({stats}), options, {}).plans.at(0);
    for_each_side(plan, [&](const TensorPlan& side, Side which, int dim) {
      INFO("side " << name(which));
      TensorPlan plain;
      plain.coder = plain_baseline(row_bytes(side, dim), dim);
      plain.clip_ratio.assign(static_cast<std::size_t>(layer.geometry.num_kv_heads), 1.0);
      // Rarely, float and double rotations lie on different sides of a rounding edge.
      CHECK(side.error->after == Approx(test::measured_error(stats, side, which)).epsilon(0.01));
      CHECK(side.error->before == Approx(test::measured_error(stats, plain, which)).epsilon(1e-4));
      const UniformCoder& baseline = std::get<UniformCoder>(plain.coder);
      CHECK(side.error->baseline == BaselineCodes{baseline.bits, baseline.group_size});
    });
  }
}

TEST_CASE("Heads that share have one rotation, clip and center", "[methods]") {
  for (const Method& method : methods()) {
    INFO(method.name);
    const LayerActivations layer = test::make_layer({.head_dim = 64, .v_head_dim = 32, .lengths = {50}});
    const LayerPlan plan = test::decide_one(layer, test::options_of(method.name, [](Options& o) {
                                              o.scope = Scope::layer;
                                              o.k.center = o.v.center = true;
                                              o.random_signs = true;
                                            }));
    CHECK(test::error_text([&] { validate(plan); }) == "no error");
    for_each_side(plan, [&](const TensorPlan& side, Side which, int dim) {
      const auto d = static_cast<std::size_t>(dim);
      CHECK(side.rotation.scope == Scope::layer);
      CHECK(side.clip_ratio.size() == (scale_rule(side.coder) == ScaleRule::minmax ? 1 : 0));
      CHECK((side.rotation.matrix.empty() || side.rotation.matrix.size() == d * d));
      CHECK((side.rotation.signs.empty() || side.rotation.signs.size() == d));
      std::vector<float> mean = channel_means(which == Side::k ? layer.k : *layer.v, 0);
      const std::vector<float> other = channel_means(which == Side::k ? layer.k : *layer.v, 1);
      for (std::size_t j = 0; j < d; ++j) mean[j] = (mean[j] + other[j]) / 2;
      // Methods that hold out tokens take the means of the other tokens.
      if (!test::options_of(method.name).budget_bits) CHECK(test::largest_difference(side.center, mean) < 1e-6);
    });
  }
}

TEST_CASE("Centering takes the channel means of each head away", "[methods]") {
  for (const Method& method : methods()) {
    INFO(method.name);
    const LayerActivations layer =
        test::make_layer({.head_dim = 64, .v_head_dim = 32, .lengths = {50}, .outliers = true});
    const LayerPlan plan =
        test::decide_one(layer, test::options_of(method.name, [](Options& o) { o.k.center = true; }));
    if (test::options_of(method.name).budget_bits) continue;  // holds out tokens and centers both sides
    REQUIRE(plan.k.center.size() == 128);
    CHECK(plan.v->center.empty());
    for (int head = 0; head < 2; ++head)
      CHECK(test::largest_difference(std::span(plan.k.center).subspan(static_cast<std::size_t>(head) * 64, 64),
                                     channel_means(layer.k, head)) < 1e-6);
  }
}

TEST_CASE("Exact layers and exact sides stay unrotated bfloat16", "[methods]") {
  for (const Method& method : methods()) {
    INFO(method.name);
    const auto options = test::options_of(method.name, [](Options& o) { o.exact_layers = {2}; });
    std::vector<LayerStats> stats;
    for (const int layer : {1, 2})
      stats.push_back(test::stats_for(test::make_layer({.layer = layer, .head_dim = 64, .v_head_dim = 32}), options));
    std::vector<std::size_t> done;
    const std::vector<LayerPlan> plans =
        method.decide(test::MemoryStats(stats), options, {.done = [&](std::size_t i) { done.push_back(i); }}).plans;
    CHECK(done == std::vector<std::size_t>{0, 1});
    REQUIRE(plans.size() == 2);
    CHECK(plans[0].layer == 1);
    CHECK_FALSE(is_exact(plans[0].k.coder));
    for_each_side(plans[1], [](const TensorPlan& side, Side, int) {
      CHECK(is_exact(side.coder));
      CHECK(side.rotation.kind == RotationKind::identity);
      CHECK(side.clip_ratio.empty());
      CHECK(side.center.empty());
      CHECK_FALSE(side.error);
    });

    const LayerPlan half = test::decide_one(test::make_layer({.head_dim = 64, .v_head_dim = 32}),
                                            test::options_of(method.name, [](Options& o) { o.v.bits = 16; }));
    CHECK_FALSE(is_exact(half.k.coder));
    CHECK(is_exact(half.v->coder));
  }
}

TEST_CASE("Every method takes every coder, and a fixed clip is the one asked for", "[methods]") {
  const LayerActivations layer = test::make_layer({.head_dim = 64, .v_head_dim = 32, .lengths = {50}});
  for (const Method& method : methods()) {
    INFO(method.name);
    if (test::options_of(method.name).k.allocate != Allocate::none) continue;  // mixed widths have no affine codes
    const LayerPlan plan = test::decide_one(layer, test::options_of(method.name, [](Options& o) {
                                              o.k = {
                                                  .bits = 3,
                                                  .group_size = 16,
                                                  .zero = ZeroKind::integer,
                                                  .scale_type = ScaleType::bf16,
                                                  .clip = 0.93,
                                                  .target = o.k.target,
                                                  .hadamard = o.k.hadamard,
                                              };
                                              o.v.bits = 5;
                                              o.v.coder = CoderKind::symmetric;
                                              o.v.rule = ScaleRule::norm;
                                              o.v.clip = 1.0;
                                            }));
    CHECK(std::get<UniformCoder>(plan.k.coder) ==
          UniformCoder{.bits = 3, .group_size = 16, .scale_type = ScaleType::bf16, .zero = ZeroKind::integer});
    CHECK(plan.k.clip_ratio == std::vector<double>{0.93, 0.93});
    CHECK(std::get<UniformCoder>(plan.v->coder).levels == UniformLevels::symmetric);
    CHECK(std::get<UniformCoder>(plan.v->coder).bits == 5);
    CHECK(plan.v->clip_ratio.empty());
  }
}

TEST_CASE("A method that is not there is refused with the list of those that are", "[methods]") {
  const auto error = test::error_of([] { find_method("quantum"); });
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::usage);
  for (const Method& method : methods()) {
    CHECK(&find_method(method.name) == &method);
    CHECK_THAT(error->what() + error->hint(), Contains(method.name));
  }
  CHECK(methods().front().name == "oscar");
}
