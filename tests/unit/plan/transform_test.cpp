#include <kvq/plan/layer_plan.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <limits>

// Transforms of formats/artifact.md: facts that a plan must state, and faults that are refused.

using namespace kvq;

namespace {

constexpr LayerGeometry kGeometry = {
    .num_q_heads = 2,
    .num_kv_heads = 1,
    .head_dim = 2,
    .v_head_dim = 2,
    .softmax_scale = 0.5,
};

/// A = [[2, 1], [0, 1/4]] of one head.
TensorPlan dense_plan() {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = 2, .group_size = 2, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  plan.rotation = {
      .kind = RotationKind::dense,
      .matrix = {2.0f, 1.0f, 0.0f, 0.25f},
      .inverse = {0.5f, -2.0f, 0.0f, 4.0f},
  };
  plan.transform = MetricTransform{.kind = "balanced", .outlier_gain = {3.0}, .condition = {2.0}};
  return plan;
}

TensorPlan scaled_plan(std::vector<float> scales) {
  TensorPlan plan = dense_plan();
  plan.rotation = {.kind = RotationKind::block_hadamard, .order = 2, .channel_scale = std::move(scales)};
  plan.transform->kind = "diagonal";
  plan.transform->condition = {1.0};
  return plan;
}

std::string fault(const TensorPlan& plan) {
  return test::error_text([&] { validate(plan, kGeometry, 3, Side::k); });
}
template <typename Change>
std::string fault(TensorPlan plan, Change change) {
  change(plan);
  return fault(plan);
}

}  // namespace

TEST_CASE("The condition of a transform by hand", "[plan]") {
  // Rows of A: sqrt(5), 1/4; columns of A^-1: 1/2, sqrt(20).
  CHECK(transform_condition(dense_plan().rotation, 0, 2) == Approx(std::sqrt((5.0 * 0.25 + 0.0625 * 20.0) / 2.0)));
  CHECK(transform_condition(scaled_plan({64.0f, 0.125f}).rotation, 0, 2) == 1.0);
  Rotation scaled = dense_plan().rotation;  // a channel 1024 times as large: the row of A is smaller by the same factor
  for (const std::size_t j : {std::size_t{0}, std::size_t{1}})
    scaled.matrix[j] /= 1024.0f, scaled.inverse[2 * j] *= 1024.0f;
  CHECK(transform_condition(scaled, 0, 2) == Approx(transform_condition(dense_plan().rotation, 0, 2)));
}

TEST_CASE("An inverse is one by its product with A", "[plan]") {
  CHECK(inverse_error(dense_plan().rotation, 0, 2) == 0.0);
  Rotation wrong = dense_plan().rotation;
  wrong.inverse[1] += 0.5f;
  CHECK(inverse_error(wrong, 0, 2) == Approx(0.125));
  wrong.inverse[1] = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(inverse_error(wrong, 0, 2)));
}

TEST_CASE("Plans with transforms are valid where all of it is there", "[plan]") {
  CHECK(fault(dense_plan()) == "no error");
  CHECK(fault(scaled_plan({0x1p-24f, 0x1p24f})) == "no error");
  CHECK(fault(scaled_plan({1.5f, 1.0078125f})) == "no error");
}

TEST_CASE("Plans with faulty transforms are refused by name", "[plan]") {
  const std::string where = "bad_input: layer 3 k: ";
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.transform.reset(); }) ==
        where + "channel_scale or inverse without a transform");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.rotation.inverse.clear(); }) ==
        where + "transform: expected a channel_scale or an inverse beside it, found neither");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.rotation.inverse.pop_back(); }) ==
        where + "inverse: expected 4 values, found 3");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.rotation.inverse[2] = INFINITY; }) ==
        where + "inverse: value 2 is not finite");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.rotation.channel_scale = {1.0f, 1.0f}; }) ==
        where + "channel_scale: expected 0 values, found 2");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.transform->kind = "best"; }) ==
        where + "transform: expected diagonal, balanced, klt or mixed, found best");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.transform->outlier_gain = {0.5}; }) ==
        where + "outlier_gain: expected finite numbers of at least 1, found 0.5");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.transform->condition = {5000.0}; }) ==
        where + "condition: expected 1 to 4096, found 5000");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.transform->condition.clear(); }) ==
        where + "condition: expected 1 values, found 0");
  CHECK(fault(dense_plan(), [](TensorPlan& p) { p.coder = ExactCoder{}; }) ==
        where + "a transform does not go with coder exact");
  for (const float scale : {0.0f, -1.0f, 0x1p-25f, 0x1p25f, 1.00390625f, INFINITY})
    CHECK(fault(scaled_plan({1.0f, scale}))
              .starts_with(where + "channel_scale: expected bfloat16 numbers from 2^-24 to 2^24, found "));
}
