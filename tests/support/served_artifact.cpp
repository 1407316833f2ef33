#include "support/served_artifact.h"

#include "support/random_data.h"

#include <kvq/codec/golden_rows.h>
#include <kvq/core/dtype.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace kvq::test {

namespace {

constexpr int kDim = 128, kKvHeads = 4, kQHeads = 16;

LayerGeometry geometry(int sliding_window) {
  return {.num_q_heads = kQHeads,
          .num_kv_heads = kKvHeads,
          .head_dim = kDim,
          .v_head_dim = kDim,
          .softmax_scale = 1.0 / std::sqrt(128.0),
          .sliding_window = sliding_window,
          .rope = {.layout = RopeLayout::half, .dim = 128, .inv_freq = std::vector<double>(64, 0.5)}};
}

TensorPlan coded(int bits, UniformLevels levels) {
  TensorPlan plan;
  const bool affine = levels == UniformLevels::affine;
  plan.coder = UniformCoder{
      .bits = bits, .group_size = kDim, .levels = levels, .rule = affine ? ScaleRule::minmax : ScaleRule::norm};
  if (affine) plan.clip_ratio.assign(kKvHeads, 1.0);
  return plan;
}

void share(TensorPlan& plan) {
  plan.rotation.scope = Scope::layer;
  if (!plan.clip_ratio.empty()) plan.clip_ratio.resize(1);
}

void hadamard(TensorPlan& plan, int order, std::uint64_t seed) {
  plan.rotation.kind = RotationKind::block_hadamard;
  plan.rotation.order = order;
  if (seed == 0) return;
  Random random(seed);
  for (int i = 0; i < (plan.rotation.scope == Scope::layer ? 1 : kKvHeads) * kDim; ++i)
    plan.rotation.signs.push_back(random.integer(0, 1) ? 1 : -1);
}

/// Orthogonal to rounding: Walsh-Hadamard with the rows in another order and other signs.
void dense(TensorPlan& plan, std::uint64_t seed) {
  plan.rotation.kind = RotationKind::dense;
  Random random(seed);
  for (int head = 0; head < (plan.rotation.scope == Scope::layer ? 1 : kKvHeads); ++head) {
    std::vector<unsigned> order(kDim);
    std::iota(order.begin(), order.end(), 0u);
    for (int i = kDim - 1; i > 0; --i)
      std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(random.integer(0, i))]);
    for (const unsigned row : order) {
      const float size = (random.integer(0, 1) ? 1.0f : -1.0f) / std::sqrt(128.0f);
      for (unsigned j = 0; j < kDim; ++j) plan.rotation.matrix.push_back(std::popcount(row & j) % 2 ? -size : size);
    }
  }
}

std::vector<float> center(const TensorPlan& plan, std::uint64_t seed) {
  return gaussian(static_cast<std::size_t>(plan.rotation.scope == Scope::layer ? 1 : kKvHeads) * kDim, seed);
}

LayerPlan layer_of(int index) {
  LayerPlan layer{.layer = index, .geometry = geometry(index == 5 ? 33 : 0), .k = {}, .v = TensorPlan{}};
  if (index == 0 || index == 5) {
    const auto seed = static_cast<std::uint64_t>(10 * index);
    layer.k = coded(2, UniformLevels::affine), layer.v = coded(2, UniformLevels::affine);
    hadamard(layer.k, 128, seed + 1), hadamard(*layer.v, 128, 0);
    layer.k.center = center(layer.k, seed + 2), layer.v->center = center(*layer.v, seed + 3);
  } else if (index == 1) {
    layer.k = coded(2, UniformLevels::symmetric), layer.v = coded(2, UniformLevels::symmetric);
    hadamard(layer.k, 64, 4), hadamard(*layer.v, 64, 5);
  } else if (index == 2) {
    layer.k = coded(4, UniformLevels::affine), layer.v = coded(2, UniformLevels::affine);
    share(*layer.v), hadamard(*layer.v, 32, 6);
  } else if (index == 4) {
    layer.k = coded(2, UniformLevels::affine), layer.v = coded(2, UniformLevels::affine);
    share(*layer.v);
    dense(layer.k, 7), dense(*layer.v, 8);
    layer.k.clip_ratio = {0.9, 1.0, 0.96, 0.97}, layer.v->clip_ratio = {0.92};
    layer.v->center = center(*layer.v, 9);
  }
  return layer;
}

std::vector<std::uint16_t> rows(std::int64_t count, std::uint64_t seed) {
  const std::vector<float> x = gaussian(static_cast<std::size_t>(count), seed);
  std::vector<std::uint16_t> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), float_to_bf16);
  return bits;
}

}  // namespace

Artifact served_artifact(Windows windows, std::int64_t golden_tokens) {
  Artifact artifact;
  artifact.model = {
      .name = "served", .fingerprint = std::string(64, 'a'), .config_json = "", .num_layers = 6, .layers = {}};
  artifact.calibration.method = "saw-int4";
  artifact.calibration.dump_hash = "xxh3-128:0123456789abcdef0123456789abcdef";
  artifact.calibration.dump_producer = "kvq tests";
  artifact.calibration.capture_point = "post_rope";
  artifact.calibration.tokens = 1000, artifact.calibration.sequences = 1;
  artifact.windows = windows;
  for (int layer = 0; layer < 6; ++layer) {
    artifact.layers.push_back(layer_of(layer));
    if (golden_tokens == 0) continue;
    const auto seed = static_cast<std::uint64_t>(100 * layer);
    GoldenTokens tokens{.first = 0,
                        .count = golden_tokens,
                        .q = rows(kQHeads * kDim, seed),
                        .k = rows(golden_tokens * kKvHeads * kDim, seed + 1),
                        .v = rows(golden_tokens * kKvHeads * kDim, seed + 2)};
    artifact.golden[layer] = code_golden_rows(artifact.layers.back(), std::move(tokens));
  }
  return artifact;
}

}  // namespace kvq::test
