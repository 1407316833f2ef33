#include <kvq/codec/codec.h>
#include <kvq/codec/fold_weights.h>
#include <kvq/core/error.h>

#include "support/transforms.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace kvq;

namespace {

constexpr int kHidden = 10, kHeads = 2, kQueryHeads = 6, kDim = 8;

struct Model {
  std::vector<double> v, v_bias, o, o_bias;
  Projection v_proj() { return {v, v_bias}; }
  Projection o_proj() { return {o, o_bias}; }
};

std::vector<double> random(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& x : values) x = normal(engine);
  return values;
}

Model random_model() {
  return {random(kHeads * kDim * kHidden, 1), random(kHeads * kDim, 2), random(kHidden * kQueryHeads * kDim, 3),
          random(kHidden, 4)};
}

/// A plan whose values are rotated by `kind`, with another rotation in each head.
/// @param transform  the maps are not orthogonal
LayerPlan plan_of(RotationKind kind, bool center, bool transform = false) {
  LayerPlan plan;
  plan.layer = 3;
  plan.geometry.num_q_heads = kQueryHeads, plan.geometry.num_kv_heads = kHeads;
  plan.geometry.head_dim = plan.geometry.v_head_dim = kDim;
  Rotation& rotation = plan.k.rotation;
  rotation.kind = kind;
  if (kind == RotationKind::block_hadamard) {
    rotation.order = 4;
    for (int i = 0; i < kHeads * kDim; ++i) rotation.signs.push_back(i % 3 ? 1 : -1);
  } else if (kind == RotationKind::dense) {
    for (int h = 0; h < kHeads; ++h)  // rotations of pairs by angles: orthogonal, but not symmetric
      for (int i = 0; i < kDim; ++i)
        for (int j = 0; j < kDim; ++j) {
          const double angle = 0.3 + h + 0.7 * (i / 2);
          const double entry = i / 2 != j / 2 ? 0.0
                               : i == j       ? std::cos(angle)
                               : i < j        ? std::sin(angle)
                                              : -std::sin(angle);
          rotation.matrix.push_back(static_cast<float>(entry));
        }
  }
  if (transform && kind == RotationKind::dense) {
    for (std::size_t i = 0; i < rotation.matrix.size();
         ++i) {  // diag(scale) from the left, and its inverse from the right
      const std::size_t h = i / (kDim * kDim), row = i / kDim % kDim, column = i % kDim;
      rotation.inverse.push_back(rotation.matrix[(h * kDim + column) * kDim + row] /
                                 (1.0f + 0.5f * static_cast<float>(column)));
    }
    for (std::size_t i = 0; i < rotation.matrix.size(); ++i)
      rotation.matrix[i] *= 1.0f + 0.5f * static_cast<float>(i / kDim % kDim);
  } else if (transform) {
    for (int i = 0; i < kHeads * kDim; ++i) rotation.channel_scale.push_back(i % 3 ? 0.5f : 8.0f);
  }
  if (center)
    for (const double x : random(kHeads * kDim, 5)) plan.k.center.push_back(static_cast<float>(x));
  plan.v = plan.k;
  return plan;
}

/// Values of the tokens, [T, Hkv, D].
std::vector<double> project(const std::vector<double>& weight, const std::vector<double>& bias,
                            const std::vector<double>& x, int tokens) {
  const std::size_t outputs = bias.size();
  std::vector<double> y;
  for (int t = 0; t < tokens; ++t)
    for (std::size_t o = 0; o < outputs; ++o) {
      double sum = bias[o];
      for (std::size_t i = 0; i < kHidden; ++i)
        sum += weight[o * kHidden + i] * x[static_cast<std::size_t>(t) * kHidden + i];
      y.push_back(sum);
    }
  return y;
}

/// Output of one position; `weights` [Hq, T] are the attention weights.
std::vector<double> attend(const Model& model, const std::vector<double>& values, const std::vector<double>& weights,
                           int tokens) {
  std::vector<double> out = model.o_bias;
  for (std::size_t q = 0; q < kQueryHeads; ++q)
    for (std::size_t d = 0; d < kDim; ++d) {
      double mixed = 0.0;
      for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t)
        mixed += weights[q * static_cast<std::size_t>(tokens) + t] * values[(t * kHeads + q / 3) * kDim + d];
      for (std::size_t o = 0; o < kHidden; ++o) out[o] += model.o[(o * kQueryHeads + q) * kDim + d] * mixed;
    }
  return out;
}

std::string message_of(const std::function<void()>& call, ErrorKind kind) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == kind);
    return error.what();
  }
  FAIL("nothing was refused");
  return {};
}

}  // namespace

TEST_CASE("Folded weights give rotated values and the same output", "[codec]") {
  const auto kind = GENERATE(RotationKind::identity, RotationKind::block_hadamard, RotationKind::dense);
  const bool center = GENERATE(false, true), transform = GENERATE(false, true);
  const LayerPlan plan = plan_of(kind, center, transform);
  constexpr int kTokens = 5;
  const std::vector<double> x = random(kTokens * kHidden, 6);
  std::vector<double> weights = random(kQueryHeads * kTokens, 7);
  for (std::size_t q = 0; q < kQueryHeads; ++q) {  // weights of a query sum to 1
    double sum = 0.0;
    for (std::size_t t = 0; t < kTokens; ++t) sum += weights[q * kTokens + t] = std::exp(weights[q * kTokens + t]);
    for (std::size_t t = 0; t < kTokens; ++t) weights[q * kTokens + t] /= sum;
  }
  const Model before = random_model();
  Model after = before;
  fold_value_rotation(plan, kHidden, DType::bf16, after.v_proj(), after.o_proj());
  const std::vector<double> plain = project(before.v, before.v_bias, x, kTokens),
                            folded = project(after.v, after.v_bias, x, kTokens);
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h) {
      const std::size_t first = static_cast<std::size_t>(t * kHeads + h) * kDim;
      const std::vector<float> row(plain.begin() + static_cast<std::ptrdiff_t>(first),
                                   plain.begin() + static_cast<std::ptrdiff_t>(first) + kDim);
      std::vector<float> rotated(kDim);
      rotate_row(*plan.v, h, row, rotated);
      for (std::size_t d = 0; d < kDim; ++d) CHECK(folded[first + d] == Approx(rotated[d]).margin(1e-5));
    }
  const std::vector<double> expected = attend(before, plain, weights, kTokens),
                            found = attend(after, folded, weights, kTokens);
  for (std::size_t o = 0; o < kHidden; ++o) CHECK(found[o] == Approx(expected[o]).margin(1e-5));  // A is a float matrix
}

namespace {

/// Transforms with this condition, or channel scales: both sides, with another map in each head.
LayerPlan transformed_plan(RotationKind kind, double condition, bool center) {
  LayerPlan plan = plan_of(kind, center);
  Rotation& rotation = plan.k.rotation;
  if (kind == RotationKind::dense) {
    const test::Transform made = test::random_transforms(kHeads, kDim, condition, 20, 2);
    rotation.matrix = made.matrix, rotation.inverse = made.inverse;
  } else {
    rotation.channel_scale = test::random_scales(kHeads, kDim, 5, 21, true, 1);
  }
  plan.v = plan.k;
  return plan;
}

/// Projections of queries and keys, with biases.
struct KeyModel {
  std::vector<double> q = random(kQueryHeads * kDim * kHidden, 8), k = random(kHeads * kDim * kHidden, 9),
                      q_bias = random(kQueryHeads * kDim, 10), k_bias = random(kHeads * kDim, 11);
  Projection q_proj() { return {q, q_bias}; }
  Projection k_proj() { return {k, k_bias}; }
  bool operator==(const KeyModel&) const = default;
};

std::vector<double> scores(const std::vector<double>& q, const std::vector<double>& k, int tokens) {
  std::vector<double> all;
  for (int a = 0; a < tokens; ++a)
    for (int b = 0; b < tokens; ++b)
      for (int h = 0; h < kQueryHeads; ++h) {
        double dot = 0.0;
        for (int i = 0; i < kDim; ++i)
          dot += q[static_cast<std::size_t>((a * kQueryHeads + h) * kDim + i)] *
                 k[static_cast<std::size_t>((b * kHeads + h / 3) * kDim + i)];
        all.push_back(dot);
      }
  return all;
}

/// Applies RoPE in the layer's layout to rows [T, heads, D]; the position of a token is its index.
std::vector<double> with_rope(std::vector<double> rows, const LayerGeometry& g, int heads) {
  const std::vector<RopeBlock> blocks = rope_blocks(g);
  for (std::size_t first = 0; first < rows.size(); first += kDim)
    for (int pair = 0; pair < g.rope.dim / 2; ++pair) {
      const auto [a, b] = blocks[static_cast<std::size_t>(pair)];
      const double angle = static_cast<double>(first / static_cast<std::size_t>(kDim * heads)) * (0.9 - 0.2 * pair);
      double &x = rows[first + static_cast<std::size_t>(a)], &y = rows[first + static_cast<std::size_t>(b)];
      const double turned = x * std::cos(angle) - y * std::sin(angle);
      y = x * std::sin(angle) + y * std::cos(angle), x = turned;
    }
  return rows;
}

}  // namespace

TEST_CASE("Folded transforms give transformed values and the same output, whatever their condition", "[codec]") {
  const auto [kind, condition] = GENERATE(
      std::pair{RotationKind::dense, 1.0}, std::pair{RotationKind::dense, 64.0}, std::pair{RotationKind::dense, 4000.0},
      std::pair{RotationKind::block_hadamard, 1.0}, std::pair{RotationKind::identity, 1.0});
  const bool center = GENERATE(false, true);
  const LayerPlan plan = transformed_plan(kind, condition, center);
  constexpr int kTokens = 5;
  const std::vector<double> x = random(kTokens * kHidden, 6), weights(kQueryHeads * kTokens, 1.0 / kTokens);
  const Model before = random_model();
  Model after = before;
  fold_value_rotation(plan, kHidden, DType::bf16, after.v_proj(), after.o_proj());
  const std::vector<double> plain = project(before.v, before.v_bias, x, kTokens),
                            folded = project(after.v, after.v_bias, x, kTokens);
  for (std::size_t first = 0; first < plain.size(); first += kDim) {
    const auto head = static_cast<int>(first / kDim % kHeads);
    const std::vector<float> row(plain.begin() + static_cast<std::ptrdiff_t>(first),
                                 plain.begin() + static_cast<std::ptrdiff_t>(first) + kDim);
    std::vector<float> rotated(kDim);
    rotate_row(*plan.v, head, row, rotated);
    float largest = 1.0f;
    for (const float y : rotated) largest = std::max(largest, std::abs(y));
    for (std::size_t d = 0; d < kDim; ++d)
      CHECK(folded[first + d] == Approx(rotated[d]).margin(1e-5 * static_cast<double>(largest)));
  }
  // A and A^-1 are floats, so the error of their product grows with the condition.
  const std::vector<double> expected = attend(before, plain, weights, kTokens),
                            found = attend(after, folded, weights, kTokens);
  for (std::size_t o = 0; o < kHidden; ++o) CHECK(found[o] == Approx(expected[o]).margin(1e-5 * condition));
}

TEST_CASE("Folded transforms of keys leave scores as they are, but for the center's", "[codec]") {
  const auto kind = GENERATE(RotationKind::dense, RotationKind::block_hadamard, RotationKind::identity);
  const LayerPlan plan = transformed_plan(kind, 64.0, false);
  constexpr int kTokens = 4;
  const std::vector<double> x = random(kTokens * kHidden, 6);
  KeyModel before, after;
  fold_key_rotation(plan, kHidden, after.q_proj(), after.k_proj());
  CHECK_FALSE(after == before);
  const std::vector<double> expected = scores(project(before.q, before.q_bias, x, kTokens),
                                              project(before.k, before.k_bias, x, kTokens), kTokens),
                            found = scores(project(after.q, after.q_bias, x, kTokens),
                                           project(after.k, after.k_bias, x, kTokens), kTokens);
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(found[i] == Approx(expected[i]).margin(1e-3));
}

TEST_CASE("Folded scales of keys stand behind RoPE, and powers of two change no score by a bit", "[codec]") {
  const auto layout = GENERATE(RopeLayout::half, RopeLayout::interleaved, RopeLayout::none);
  const int dim = layout == RopeLayout::none ? 0 : GENERATE(8, 4), offset = dim == 4 ? 2 : 0;
  LayerPlan plan = transformed_plan(RotationKind::block_hadamard, 1.0, true);
  plan.geometry.rope = {.layout = layout, .dim = dim, .offset = offset};
  std::vector<float>& scales = plan.k.rotation.channel_scale;
  scales = test::random_scales(kHeads, kDim, 6, 22, false, 1);
  const std::vector<RopeBlock> blocks = rope_blocks(plan.geometry);
  for (std::size_t first = 0; first < scales.size(); first += kDim)
    for (int pair = 0; pair < dim / 2; ++pair)
      scales[first + static_cast<std::size_t>(blocks[static_cast<std::size_t>(pair)].second)] =
          scales[first + static_cast<std::size_t>(blocks[static_cast<std::size_t>(pair)].first)];
  REQUIRE(key_scale_fault(plan) == "");

  constexpr int kTokens = 4;
  const std::vector<double> x = random(kTokens * kHidden, 6);
  KeyModel before, after;
  fold_key_scales(plan, kHidden, after.q_proj(), after.k_proj());
  const std::vector<double> k = with_rope(project(before.k, before.k_bias, x, kTokens), plan.geometry, kHeads),
                            k_after = with_rope(project(after.k, after.k_bias, x, kTokens), plan.geometry, kHeads),
                            q = with_rope(project(before.q, before.q_bias, x, kTokens), plan.geometry, kQueryHeads),
                            q_after = with_rope(project(after.q, after.q_bias, x, kTokens), plan.geometry, kQueryHeads);
  for (std::size_t i = 0; i < k.size(); ++i)
    CHECK(k_after[i] == k[i] * static_cast<double>(scales[i % (kHeads * kDim)]));
  CHECK(scores(q_after, k_after, kTokens) == scores(q, k, kTokens));
}

TEST_CASE("Norms of queries and keys take the scales where all heads have the same", "[codec]") {
  LayerPlan plan = transformed_plan(RotationKind::block_hadamard, 1.0, false);
  std::vector<float>& scales = plan.k.rotation.channel_scale;
  const std::vector<double> norm = random(kDim, 12);
  std::vector<double> q = norm, k = norm;
  CHECK_THAT(message_of([&] { fold_key_scales(plan, q, k); }, ErrorKind::unsupported),
             Catch::Contains("layer 3: k: channel_scale") && Catch::Contains("KV heads 0 and 1 differ"));
  CHECK((q == norm && k == norm));
  for (std::size_t i = 0; i < kDim; ++i) scales[kDim + i] = scales[i];
  fold_key_scales(plan, q, k);
  for (std::size_t i = 0; i < kDim; ++i) {
    CHECK(k[i] == norm[i] * static_cast<double>(scales[i]));
    CHECK(q[i] == norm[i] / static_cast<double>(scales[i]));
  }
  scales.resize(kDim), plan.k.rotation.scope = Scope::layer;  // one set of scales for all heads
  q = k = norm;
  CHECK_NOTHROW(fold_key_scales(plan, q, k));
  q.pop_back();
  CHECK_THAT(message_of([&] { fold_key_scales(plan, q, k); }, ErrorKind::bad_input),
             Catch::Contains("q_norm: expected 8 numbers, found 7"));
}

TEST_CASE("Scales of keys that RoPE would mix are refused by name", "[codec]") {
  LayerPlan plan = transformed_plan(RotationKind::block_hadamard, 1.0, false);
  plan.geometry.rope = {.layout = RopeLayout::half, .dim = 8};
  REQUIRE(key_scale_fault(plan) == "");
  plan.k.rotation.channel_scale[kDim + 2] = 0x1p9f;
  KeyModel model;
  const std::string message =
      message_of([&] { fold_key_scales(plan, kHidden, model.q_proj(), model.k_proj()); }, ErrorKind::unsupported);
  CHECK_THAT(message, Catch::Contains("found 512 of channel 2") && Catch::Contains("of channel 6 of head 1"));
  CHECK((model == KeyModel()));
  plan.k.rotation.channel_scale.clear();
  CHECK_THAT(key_scale_fault(plan), Catch::Contains("no channel_scale"));
}

TEST_CASE("The error of folding is that of rounding", "[codec]") {
  Model model = random_model();
  for (double& w : model.v) w = std::ldexp(std::nearbyint(std::ldexp(w, 4)), -4);  // few digits, so exact in bfloat16
  const FoldError identity =
      fold_value_rotation(plan_of(RotationKind::identity, false), kHidden, DType::bf16, model.v_proj(), model.o_proj());
  CHECK(identity.v_proj == 0.0);
  CHECK(identity.v_proj_before == 0.0);
  CHECK(identity.o_proj == identity.o_proj_before);
  // Eight digits: an error that is uniform in the last place, 2^-7 of numbers between 1 and 2.
  CHECK(identity.o_proj > 0.5 * std::ldexp(1.0, -7) / std::sqrt(12.0));
  CHECK(identity.o_proj < std::ldexp(1.0, -7) / std::sqrt(12.0));
  const FoldError bf16 =
      fold_value_rotation(plan_of(RotationKind::dense, false), kHidden, DType::bf16, model.v_proj(), model.o_proj());
  CHECK(bf16.v_proj > 1e-3);
  CHECK(bf16.v_proj < 4e-3);
  Model other = random_model();
  const FoldError f32 =
      fold_value_rotation(plan_of(RotationKind::dense, false), kHidden, DType::f32, other.v_proj(), other.o_proj());
  CHECK(f32.v_proj < 1e-7);
}

TEST_CASE("What cannot be folded is refused with the reason", "[codec]") {
  using Catch::Contains;
  const auto refusal = [](auto change, ErrorKind kind) {
    LayerPlan plan = plan_of(RotationKind::dense, false);
    Model model = random_model();
    int hidden = kHidden;
    change(plan, model, hidden);
    return message_of([&] { fold_value_rotation(plan, hidden, DType::bf16, model.v_proj(), model.o_proj()); }, kind);
  };
  CHECK_THAT(refusal([](LayerPlan& p, Model&, int&) { p.v.reset(); }, ErrorKind::unsupported),
             Contains("layer 3: has no values"));
  CHECK_THAT(refusal([](LayerPlan& p, Model&, int&) { p.v->centroids = Centroids{}; }, ErrorKind::unsupported),
             Contains("centroids"));
  CHECK_THAT(refusal([](LayerPlan&, Model&, int& hidden) { hidden = 11; }, ErrorKind::bad_input),
             Contains("v_proj: expected 176 numbers, found 160"));
  CHECK_THAT(refusal([](LayerPlan&, Model& m, int&) { m.o.pop_back(); }, ErrorKind::bad_input), Contains("o_proj"));
  CHECK_THAT(refusal([](LayerPlan&, Model& m, int&) { m.v_bias.pop_back(); }, ErrorKind::bad_input),
             Contains("v_proj bias"));
  CHECK_THAT(refusal([](LayerPlan& p, Model& m, int&) { p.v->center.assign(kHeads * kDim, 1.0f), m.o_bias.clear(); },
                     ErrorKind::unsupported),
             Contains("a center needs biases"));
}

TEST_CASE("Keys are folded only where no position rotates them", "[codec]") {
  const auto kind = GENERATE(RotationKind::block_hadamard, RotationKind::dense);
  LayerPlan plan = plan_of(kind, true, GENERATE(false, true));
  std::vector<double> q = random(kQueryHeads * kDim * kHidden, 8), k = random(kHeads * kDim * kHidden, 9),
                      k_bias(kHeads * kDim, 0.0), q_bias(kQueryHeads * kDim, 0.5);
  const std::vector<double> q_before = q, k_before = k, k_bias_before = k_bias, q_bias_before = q_bias;
  plan.geometry.rope = {.layout = RopeLayout::half, .dim = kDim};
  CHECK_THAT(message_of([&] { fold_key_rotation(plan, kHidden, {q, q_bias}, {k, k_bias}); }, ErrorKind::unsupported),
             Catch::Contains("does not commute"));
  CHECK(q == q_before);
  CHECK(k == k_before);

  plan.geometry.rope = {};
  fold_key_rotation(plan, kHidden, {q, q_bias}, {k, k_bias});
  constexpr int kTokens = 4;
  const std::vector<double> x = random(kTokens * kHidden, 10);
  const std::vector<double> q0 = project(q_before, q_bias_before, x, kTokens),
                            k0 = project(k_before, k_bias_before, x, kTokens);
  const std::vector<double> q1 = project(q, q_bias, x, kTokens), k1 = project(k, k_bias, x, kTokens);
  // Logits differ only by q . center, one number for each query and head.
  for (std::size_t head = 0; head < kQueryHeads; ++head)
    for (std::size_t t = 0; t < kTokens; ++t) {
      double shift = 0.0;
      for (std::size_t d = 0; d < kDim; ++d)
        shift += q0[(t * kQueryHeads + head) * kDim + d] * static_cast<double>(plan.k.center[head / 3 * kDim + d]);
      for (std::size_t s = 0; s < kTokens; ++s) {
        double a = 0.0, b = 0.0;
        for (std::size_t d = 0; d < kDim; ++d) {
          a += q0[(t * kQueryHeads + head) * kDim + d] * k0[(s * kHeads + head / 3) * kDim + d];
          b += q1[(t * kQueryHeads + head) * kDim + d] * k1[(s * kHeads + head / 3) * kDim + d];
        }
        CHECK(b == Approx(a - shift).margin(1e-5));
      }
    }
}
