#include "support/artifacts.h"

#include <kvq/solve/spectral.h>

#include "support/matrix.h"
#include "support/random_data.h"

#include <cmath>
#include <span>

namespace kvq::test {

namespace {

LayerGeometry geometry(bool has_values) {
  return {
      .num_q_heads = 4,
      .num_kv_heads = has_values ? 2 : 1,
      .head_dim = 8,
      .v_head_dim = 4,
      .softmax_scale = 1.0 / std::sqrt(8.0),
      .sliding_window = 128,
      .kind = has_values ? AttentionKind::gqa : AttentionKind::mla_rope,
      .rope = {.layout = RopeLayout::half, .dim = 4, .offset = 2, .attention_factor = 1.1, .inv_freq = {1.0, 0.01}},
  };
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
    append_orthogonal(plan.rotation.eigenbasis, dim, seed + head);
    const auto basis =
        std::span(plan.rotation.eigenbasis).last(static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim));
    const std::vector<double> matrix =
        compose(composition_of(CompositionId::uhp), std::vector<double>(basis.begin(), basis.end()), dim, dim);
    plan.rotation.matrix.insert(plan.rotation.matrix.end(), matrix.begin(), matrix.end());
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
  plan.rotation.recipe = "S*H";
  plan.rotation.signs = {1, -1, -1, 1, 1, 1, -1, 1};
  plan.coder = UniformCoder{
      .bits = 3,
      .group_size = 4,
      .levels = UniformLevels::symmetric,
      .rule = ScaleRule::norm,
      .scale_type = ScaleType::bf16,
  };
  return plan;
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
  artifact.layers = {
      {.layer = 0, .geometry = geometry(true), .k = dense_plan(8, 2, Scope::kv_head, 1), .v = hadamard_plan()},
      {.layer = 1, .geometry = geometry(true), .k = TensorPlan{}, .v = TensorPlan{}},
      {.layer = 4, .geometry = geometry(false), .k = dense_plan(8, 1, Scope::layer, 7), .v = std::nullopt}};
  std::get<UniformCoder>(artifact.layers[2].k.coder) = {
      .bits = 4,
      .group_size = 8,
      .scale_type = ScaleType::fp32,
      .zero = ZeroKind::integer,
  };
  artifact.layers[2].k.center.clear();
  return artifact;
}

}  // namespace kvq::test
