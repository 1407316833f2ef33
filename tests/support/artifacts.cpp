#include "support/artifacts.h"

#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>

namespace kvq::test {

namespace {

LayerGeometry geometry(bool has_values) {
  return {.num_q_heads = 4,
          .num_kv_heads = has_values ? 2 : 1,
          .head_dim = 8,
          .v_head_dim = 4,
          .softmax_scale = 1.0 / std::sqrt(8.0),
          .sliding_window = 128,
          .kind = has_values ? AttentionKind::gqa : AttentionKind::mla_rope,
          .rope = {.layout = RopeLayout::half, .dim = 4, .offset = 2, .attention_factor = 1.1, .inv_freq = {1.0, 0.01}}};
}

void append_orthogonal(std::vector<float>& into, int dim, std::uint64_t seed) {
  const std::vector<double> matrix = random_orthogonal(dim, seed);
  into.insert(into.end(), matrix.begin(), matrix.end());
}

TensorPlan dense_plan(int dim, std::uint64_t heads, Scope scope, std::uint64_t seed) {
  TensorPlan plan;
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.scope = scope;
  plan.rotation.order = dim;
  plan.rotation.recipe = "U*H*P";
  plan.rotation.target = "query";
  for (std::uint64_t head = 0; head < heads; ++head) {
    append_orthogonal(plan.rotation.matrix, dim, seed + head);
    append_orthogonal(plan.rotation.eigenbasis, dim, seed + 50 + head);
    for (int j = 0; j < dim; ++j) plan.rotation.spectrum.push_back(static_cast<float>(dim - j) * 0.3f);
    plan.rotation.sign_choice.push_back(head == 0 ? "canonical" : "random 3 of 8");
    plan.clip_ratio.push_back(head == 0 ? 0.96 : 1.0);
  }
  plan.center = gaussian(static_cast<std::size_t>(dim) * heads, seed + 99);
  plan.coder = UniformCoder{.bits = 2, .group_size = dim / 2};
  plan.error = FitError{.metric = "query_weighted", .before = 0.25, .after = 0.1};
  return plan;
}

TensorPlan hadamard_plan() {
  TensorPlan plan;
  plan.rotation.kind = RotationKind::block_hadamard;
  plan.rotation.order = 2;
  plan.rotation.recipe = "H";
  plan.rotation.signs = {1, -1, -1, 1, 1, 1, -1, 1};
  plan.coder = UniformCoder{.bits = 3, .group_size = 4, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm, .scale_type = ScaleType::bf16};
  return plan;
}

void check_equal_sides(const TensorPlan& a, const TensorPlan& b) {
  const Rotation &x = a.rotation, &y = b.rotation;
  CHECK(x.kind == y.kind);
  CHECK(x.scope == y.scope);
  CHECK(x.order == y.order);
  CHECK(x.signs == y.signs);
  CHECK(x.matrix == y.matrix);
  CHECK(x.recipe == y.recipe);
  CHECK(x.target == y.target);
  CHECK(x.sign_choice == y.sign_choice);
  CHECK(x.eigenbasis == y.eigenbasis);
  CHECK(x.spectrum == y.spectrum);
  CHECK(a.center == b.center);
  CHECK(a.coder == b.coder);
  CHECK(a.clip_ratio == b.clip_ratio);
  REQUIRE(a.error.has_value() == b.error.has_value());
  if (!a.error) return;
  CHECK(a.error->metric == b.error->metric);
  CHECK(a.error->before == b.error->before);
  CHECK(a.error->after == b.error->after);
}

}  // namespace

Artifact example_artifact() {
  Artifact artifact;
  artifact.model.name = "tiny";
  artifact.model.fingerprint = std::string(64, 'c');
  artifact.model.config_json = R"({"hidden_size":32,"rope_theta":10000.0})";
  artifact.model.num_layers = 6;
  artifact.calibration.method = "oscar";
  artifact.calibration.dump_hash = "xxh3-128:0123456789abcdef0123456789abcdef";
  artifact.calibration.dump_producer = "kvq tests";
  artifact.calibration.capture_point = "post_rope";
  artifact.calibration.tokens = 4096;
  artifact.calibration.sequences = 3;
  artifact.calibration.seed = 0x7fffffffffffffff;
  artifact.calibration.options = {{"method", "oscar"}, {"seed", 7}};
  artifact.windows = {.sink_tokens = 64, .recent_tokens = 256};
  artifact.layers = {{.layer = 0, .geometry = geometry(true), .k = dense_plan(8, 2, Scope::kv_head, 1), .v = hadamard_plan()},
                     {.layer = 1, .geometry = geometry(true), .k = TensorPlan{}, .v = TensorPlan{}},
                     {.layer = 4, .geometry = geometry(false), .k = dense_plan(8, 1, Scope::layer, 7), .v = std::nullopt}};
  std::get<UniformCoder>(artifact.layers[2].k.coder) = {.bits = 4, .group_size = 8, .scale_type = ScaleType::fp32, .zero = ZeroKind::integer};
  artifact.layers[2].k.center.clear();
  return artifact;
}

void check_equal(const LayerPlan& a, const LayerPlan& b) {
  INFO("layer " << a.layer);
  CHECK(a.layer == b.layer);
  CHECK(a.geometry == b.geometry);
  check_equal_sides(a.k, b.k);
  REQUIRE(a.v.has_value() == b.v.has_value());
  if (a.v) check_equal_sides(*a.v, *b.v);
}

void check_equal(const Artifact& a, const Artifact& b) {
  CHECK(a.model.name == b.model.name);
  CHECK(a.model.fingerprint == b.model.fingerprint);
  CHECK(a.model.num_layers == b.model.num_layers);
  CHECK(parse_json(a.model.config_json, "a") == parse_json(b.model.config_json, "b"));
  CHECK(a.calibration.method == b.calibration.method);
  CHECK(a.calibration.tool == b.calibration.tool);
  CHECK(a.calibration.dump_hash == b.calibration.dump_hash);
  CHECK(a.calibration.dump_producer == b.calibration.dump_producer);
  CHECK(a.calibration.capture_point == b.calibration.capture_point);
  CHECK(a.calibration.tokens == b.calibration.tokens);
  CHECK(a.calibration.sequences == b.calibration.sequences);
  CHECK(a.calibration.seed == b.calibration.seed);
  CHECK(a.calibration.options == b.calibration.options);
  CHECK(a.windows == b.windows);
  REQUIRE(a.layers.size() == b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) check_equal(a.layers[i], b.layers[i]);
}

}  // namespace kvq::test
