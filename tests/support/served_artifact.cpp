#include "support/served_artifact.h"

#include "support/random_data.h"
#include "support/transforms.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/golden_rows.h>
#include <kvq/core/dtype.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <numeric>
#include <optional>

namespace kvq::test {

namespace {

constexpr int kDim = 128, kKvHeads = 4, kQHeads = 16;

LayerGeometry geometry(int sliding_window) {
  return {
      .num_q_heads = kQHeads,
      .num_kv_heads = kKvHeads,
      .head_dim = kDim,
      .v_head_dim = kDim,
      .softmax_scale = 1.0 / std::sqrt(128.0),
      .sliding_window = sliding_window,
      .rope = {.layout = RopeLayout::half, .dim = 128, .inv_freq = std::vector<double>(64, 0.5)},
  };
}

TensorPlan coded(int bits, UniformLevels levels) {
  TensorPlan plan;
  const bool affine = levels == UniformLevels::affine;
  plan.coder = UniformCoder{
      .bits = bits,
      .group_size = kDim,
      .levels = levels,
      .rule = affine ? ScaleRule::minmax : ScaleRule::norm,
  };
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

/// A rotation that is orthogonal up to rounding: a Walsh-Hadamard matrix with rows in another order and with other
/// signs.
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

void transform(TensorPlan& plan, double condition, std::uint64_t seed) {
  const int entries = plan.rotation.scope == Scope::layer ? 1 : kKvHeads;
  const Transform made = random_transforms(entries, kDim, condition, seed, 2);
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.matrix = made.matrix, plan.rotation.inverse = made.inverse;
  plan.transform = {.kind = "balanced"};
}

void scale(TensorPlan& plan, int spread, std::uint64_t seed) {
  plan.rotation.channel_scale = random_scales(
      kKvHeads, kDim, spread, seed, true,
      1);  // powers of two with few digits, so that 16-bit rows of an engine hold the products without rounding
  plan.transform = {.kind = "diagonal"};
}

/// Sets outlier gain and condition of a transform.
void measure(std::optional<TensorPlan>& plan) {
  if (!plan->transform) return;
  for (int entry = 0; entry < (plan->rotation.scope == Scope::layer ? 1 : kKvHeads); ++entry) {
    plan->transform->outlier_gain.push_back(1.5);
    plan->transform->condition.push_back(transform_condition(plan->rotation, entry, kDim));
  }
}

LayerPlan transformed_layer_of(int index) {
  LayerPlan layer{.layer = index, .geometry = geometry(0), .k = {}, .v = TensorPlan{}};
  const auto seed = static_cast<std::uint64_t>(1000 + 10 * index);
  if (index == 0 || index == 3) {
    layer.k = coded(2, UniformLevels::affine), layer.v = coded(2, UniformLevels::affine);
    hadamard(layer.k, 128, index == 0 ? seed : 0), hadamard(*layer.v, 64, index == 0 ? seed + 1 : 0);
    if (index == 0) scale(layer.k, 4, seed + 2);
    scale(*layer.v, 6, seed + 3);
    if (index == 0) layer.k.center = center(layer.k, seed + 4), layer.v->center = center(*layer.v, seed + 5);
  } else if (index == 1 || index == 4) {
    const UniformLevels levels = index == 1 ? UniformLevels::symmetric : UniformLevels::affine;
    layer.k = coded(2, levels), layer.v = coded(2, levels);
    share(*layer.v);
    transform(layer.k, index == 1 ? 4.0 : 4000.0, seed), transform(*layer.v, index == 1 ? 3.0 : 4000.0, seed + 5);
    if (index == 1) layer.v->center = center(*layer.v, seed + 6);
  } else {
    layer.k = coded(4, UniformLevels::affine), layer.v = coded(2, UniformLevels::affine);
    scale(layer.k, 3, seed);
    for (std::size_t i = kDim; i < kKvHeads * kDim; ++i)
      layer.k.rotation.channel_scale[i] = layer.k.rotation.channel_scale[i - kDim];
    share(*layer.v), transform(*layer.v, 2.0, seed + 1);
  }
  std::optional<TensorPlan> k = layer.k;
  measure(k), measure(layer.v);
  layer.k = *k;
  return layer;
}

Artifact empty_artifact(Windows windows, int layers) {
  Artifact artifact;
  artifact.model = {
      .name = "served",
      .fingerprint = std::string(64, 'a'),
      .config_json = "",
      .num_layers = layers,
      .layers = {},
  };
  artifact.calibration.method = "saw-int4";
  artifact.calibration.dump_hash = "xxh3-128:0123456789abcdef0123456789abcdef";
  artifact.calibration.dump_producer = "kvq tests";
  artifact.calibration.capture_point = "post_rope";
  artifact.calibration.tokens = 1000, artifact.calibration.sequences = 1;
  artifact.windows = windows;
  return artifact;
}

}  // namespace

std::vector<std::uint16_t> rows_for(const TensorPlan& plan, std::span<const float> wanted, int first_head) {
  std::vector<std::uint16_t> bits;
  std::vector<float> x(kDim);
  for (std::size_t head = 0; head < wanted.size() / kDim; ++head) {
    unrotate_row(plan, first_head + static_cast<int>(head), wanted.subspan(head * kDim, kDim), x);
    std::transform(x.begin(), x.end(), std::back_inserter(bits), float_to_bf16);
  }
  return bits;
}

std::vector<std::uint16_t> queries_for(const TensorPlan& plan, int num_kv_heads, std::span<const float> wanted) {
  // Queries are multiplied by A^-T, so the matrix of `turned` is A^-T and its inverse is A^T.
  TensorPlan turned;
  turned.rotation = plan.rotation;
  std::swap(turned.rotation.matrix, turned.rotation.inverse);
  for (std::vector<float>* matrices : {&turned.rotation.matrix, &turned.rotation.inverse})
    for (std::size_t first = 0; first < matrices->size(); first += kDim * kDim)
      for (std::size_t i = 0; i < kDim; ++i)
        for (std::size_t j = 0; j < i; ++j)
          std::swap((*matrices)[first + i * kDim + j], (*matrices)[first + j * kDim + i]);
  for (float& x : turned.rotation.channel_scale) x = 1.0f / x;
  std::vector<std::uint16_t> bits;
  std::vector<float> q(kDim);
  const std::size_t heads = wanted.size() / kDim, group = heads / static_cast<std::size_t>(num_kv_heads);
  for (std::size_t head = 0; head < heads; ++head) {
    unrotate_row(turned, static_cast<int>(head / group), wanted.subspan(head * kDim, kDim), q);
    std::transform(q.begin(), q.end(), std::back_inserter(bits), float_to_bf16);
  }
  return bits;
}

Artifact transformed_artifact(Windows windows, std::int64_t golden_tokens) {
  Artifact artifact = empty_artifact(windows, 5);
  for (int layer = 0; layer < 5; ++layer) {
    artifact.layers.push_back(transformed_layer_of(layer));
    if (golden_tokens == 0) continue;
    const LayerPlan& plan = artifact.layers.back();
    const auto seed = static_cast<std::uint64_t>(100 * layer);
    GoldenTokens tokens{.first = 0, .count = golden_tokens};
    tokens.q = queries_for(plan.k, kKvHeads, gaussian(kQHeads * kDim, seed));
    for (std::int64_t t = 0; t < golden_tokens; ++t)
      for (const Side side : kSides) {
        const std::vector<std::uint16_t> bits = rows_for(
            *plan.side(side),
            gaussian(kKvHeads * kDim, seed + 1000 * static_cast<std::uint64_t>(t) + (side == Side::v ? 2 : 1)));
        std::vector<std::uint16_t>& all = side == Side::v ? tokens.v : tokens.k;
        all.insert(all.end(), bits.begin(), bits.end());
      }
    artifact.golden[layer] = code_golden_rows(plan, std::move(tokens));
  }
  return artifact;
}

Artifact served_artifact(Windows windows, std::int64_t golden_tokens) {
  Artifact artifact = empty_artifact(windows, 6);
  for (int layer = 0; layer < 6; ++layer) {
    artifact.layers.push_back(layer_of(layer));
    if (golden_tokens == 0) continue;
    const auto seed = static_cast<std::uint64_t>(100 * layer);
    GoldenTokens tokens{
        .first = 0,
        .count = golden_tokens,
        .q = rows(kQHeads * kDim, seed),
        .k = rows(golden_tokens * kKvHeads * kDim, seed + 1),
        .v = rows(golden_tokens * kKvHeads * kDim, seed + 2),
    };
    artifact.golden[layer] = code_golden_rows(artifact.layers.back(), std::move(tokens));
  }
  return artifact;
}

}  // namespace kvq::test
