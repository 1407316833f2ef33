#include <kvq/plan/layer_plan.h>

#include "support/error_of.h"
#include "support/matrix.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <functional>
#include <limits>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Two KV heads with 8 channels for keys and 4 for values; every feature is used.
LayerPlan valid_plan() {
  LayerPlan plan{
      .layer = 3,
      .geometry = {.num_q_heads = 4, .num_kv_heads = 2, .head_dim = 8, .v_head_dim = 4, .softmax_scale = 0.5},
      .k = {},
      .v = TensorPlan{},
  };
  const auto matrix = test::sylvester_blocks(8, 8);
  plan.k.rotation.kind = RotationKind::dense;
  plan.k.rotation.order = 8;
  plan.k.rotation.recipe = "U*H";
  plan.k.rotation.target = "query";
  plan.k.rotation.sign_choice = {"canonical", "canonical"};
  for (int head = 0; head < 2; ++head)
    plan.k.rotation.matrix.insert(plan.k.rotation.matrix.end(), matrix.begin(), matrix.end());
  plan.k.rotation.eigenbasis = plan.k.rotation.matrix;
  plan.k.rotation.spectrum = {8, 7, 6, 5, 4, 3, 2, 1, 8, 7, 6, 5, 4, 3, 2, 1};
  plan.k.center.assign(16, 0.5f);
  plan.k.coder = UniformCoder{.bits = 2, .group_size = 4};
  plan.k.clip_ratio = {0.9, 1.0};
  plan.k.error = FitError{.metric = "query_weighted", .before = 0.2, .after = 0.1};
  plan.v->rotation.kind = RotationKind::block_hadamard;
  plan.v->rotation.scope = Scope::layer;
  plan.v->rotation.order = 4;
  plan.v->rotation.signs = {1, -1, -1, 1};
  plan.v->rotation.recipe = "H";
  plan.v->coder = UniformCoder{.bits = 4, .group_size = 4, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  return plan;
}

UniformCoder& coder_of(TensorPlan& plan) { return std::get<UniformCoder>(plan.coder); }

struct Fault {
  const char* name;
  Side side;
  std::function<void(LayerPlan&)> make;
};

const Fault kFaults[] = {
    {"matrix too short", Side::k, [](LayerPlan& p) { p.k.rotation.matrix.pop_back(); }},
    {"matrix for one head only", Side::k, [](LayerPlan& p) { p.k.rotation.matrix.resize(64); }},
    {"NaN in the matrix", Side::k, [](LayerPlan& p) { p.k.rotation.matrix[70] = kNan; }},
    {"infinity in the matrix", Side::k, [](LayerPlan& p) { p.k.rotation.matrix[70] = HUGE_VALF; }},
    {"matrix of an identity", Side::k, [](LayerPlan& p) { p.k.rotation.kind = RotationKind::identity; }},
    {"matrix of a block Hadamard", Side::v, [](LayerPlan& p) { p.v->rotation.matrix.assign(16, 0.0f); }},
    {"eigenbasis of another size", Side::k, [](LayerPlan& p) { p.k.rotation.eigenbasis.pop_back(); }},
    {"NaN in the eigenbasis", Side::k, [](LayerPlan& p) { p.k.rotation.eigenbasis[0] = kNan; }},
    {"eigenbasis without spectrum", Side::k, [](LayerPlan& p) { p.k.rotation.spectrum.clear(); }},
    {"spectrum without eigenbasis", Side::k, [](LayerPlan& p) { p.k.rotation.eigenbasis.clear(); }},
    {"spectrum of another size", Side::k, [](LayerPlan& p) { p.k.rotation.spectrum.pop_back(); }},
    {"NaN in the spectrum", Side::k, [](LayerPlan& p) { p.k.rotation.spectrum[3] = kNan; }},
    {"sign choice of another size", Side::k, [](LayerPlan& p) { p.k.rotation.sign_choice.pop_back(); }},
    {"center of another size", Side::k, [](LayerPlan& p) { p.k.center.pop_back(); }},
    {"NaN in the center", Side::k, [](LayerPlan& p) { p.k.center[15] = kNan; }},
    {"order not a power of two", Side::v, [](LayerPlan& p) { p.v->rotation.order = 3; }},
    {"order that does not divide", Side::v, [](LayerPlan& p) { p.v->rotation.order = 8; }},
    {"order zero", Side::v, [](LayerPlan& p) { p.v->rotation.order = 0; }},
    {"sign that is no sign", Side::v, [](LayerPlan& p) { p.v->rotation.signs[2] = 2; }},
    {"sign of zero", Side::v, [](LayerPlan& p) { p.v->rotation.signs[0] = 0; }},
    {"signs for two heads where one is shared", Side::v, [](LayerPlan& p) { p.v->rotation.signs.assign(8, 1); }},
    {"no bits", Side::k, [](LayerPlan& p) { coder_of(p.k).bits = 0; }},
    {"nine bits", Side::k, [](LayerPlan& p) { coder_of(p.k).bits = 9; }},
    {"group size zero", Side::k, [](LayerPlan& p) { coder_of(p.k).group_size = 0; }},
    {"negative group size", Side::k, [](LayerPlan& p) { coder_of(p.k).group_size = -4; }},
    {"group size that does not divide", Side::k, [](LayerPlan& p) { coder_of(p.k).group_size = 3; }},
    {"group size above the dimension", Side::v, [](LayerPlan& p) { coder_of(*p.v).group_size = 8; }},
    {"affine with a symmetric rule", Side::k, [](LayerPlan& p) { coder_of(p.k).rule = ScaleRule::norm; }},
    {"symmetric with minmax", Side::v, [](LayerPlan& p) { coder_of(*p.v).rule = ScaleRule::minmax; }},
    {"clip of zero", Side::k, [](LayerPlan& p) { p.k.clip_ratio[0] = 0.0; }},
    {"clip above one", Side::k, [](LayerPlan& p) { p.k.clip_ratio[1] = 1.1; }},
    {"clip that is NaN", Side::k, [](LayerPlan& p) { p.k.clip_ratio[1] = std::nan(""); }},
    {"clip for one head only", Side::k, [](LayerPlan& p) { p.k.clip_ratio.pop_back(); }},
    {"no clip at minmax", Side::k, [](LayerPlan& p) { p.k.clip_ratio.clear(); }},
    {"clip of a rule without range", Side::v, [](LayerPlan& p) { p.v->clip_ratio = {1.0, 1.0}; }},
};

}  // namespace

TEST_CASE("A whole plan, an exact one and one without values are valid", "[plan]") {
  LayerPlan plan = valid_plan();
  CHECK(error_text([&] { validate(plan); }) == "no error");
  plan.v.reset();
  CHECK(error_text([&] { validate(plan); }) == "no error");
  plan.k = TensorPlan{};
  CHECK(error_text([&] { validate(plan); }) == "no error");
}

TEST_CASE("A faulty plan is refused with layer and side", "[plan]") {
  for (const Fault& fault : kFaults) {
    INFO(fault.name);
    LayerPlan plan = valid_plan();
    fault.make(plan);
    CHECK_THAT(error_text([&] { validate(plan); }),
               Catch::Matchers::StartsWith("bad_input: ") && Contains("layer 3") && Contains(name(fault.side)));
  }
}

TEST_CASE("Orthogonality error is the largest deviation of any head", "[plan]") {
  Rotation rotation = valid_plan().k.rotation;
  CHECK(orthogonality_error(rotation, 8) < 1e-7);
  for (std::size_t i = 64; i < 128; ++i) rotation.matrix[i] *= 1.01f;  // the second head
  CHECK(orthogonality_error(rotation, 8) == Approx(0.0201).epsilon(1e-4));
  rotation = valid_plan().k.rotation;
  rotation.matrix[64 + 1] += 0.125f;  // changes one entry: the length of a column and its products with the others
  const double entry = 1.0 / std::sqrt(8.0);
  CHECK(orthogonality_error(rotation, 8) == Approx(2 * 0.125 * entry + 0.125 * 0.125).epsilon(1e-5));
  CHECK(orthogonality_error(valid_plan().v->rotation, 4) == 0.0);
  CHECK(orthogonality_error(Rotation{}, 4) == 0.0);
}
