#include <kvq/codec/codec.h>
#include <kvq/codec/fold_weights.h>
#include <kvq/core/error.h>

#include <catch2/catch.hpp>

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

/// A plan whose values are rotated by `kind`, each head in its own way.
/// @param transform  by a map that is not orthogonal
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
    for (int h = 0; h < kHeads; ++h)  // rotations of pairs by angles: orthogonal, and not symmetric
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
    for (std::size_t i = 0; i < rotation.matrix.size(); ++i) {  // diag(scale) from the left, and its inverse from the right
      const std::size_t h = i / (kDim * kDim), row = i / kDim % kDim, column = i % kDim;
      rotation.inverse.push_back(rotation.matrix[(h * kDim + column) * kDim + row] / (1.0f + 0.5f * static_cast<float>(column)));
    }
    for (std::size_t i = 0; i < rotation.matrix.size(); ++i) rotation.matrix[i] *= 1.0f + 0.5f * static_cast<float>(i / kDim % kDim);
  } else if (transform) {
    for (int i = 0; i < kHeads * kDim; ++i) rotation.channel_scale.push_back(i % 3 ? 0.5f : 8.0f);
  }
  if (center)
    for (const double x : random(kHeads * kDim, 5)) plan.k.center.push_back(static_cast<float>(x));
  plan.v = plan.k;
  return plan;
}

/// Values of some tokens, [T, Hkv, D].
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

/// Output of one position whose heads weigh the tokens by `weights`, [Hq, T].
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
  for (std::size_t q = 0; q < kQueryHeads; ++q) {  // they sum to 1
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

TEST_CASE("The error of folding is that of rounding", "[codec]") {
  Model model = random_model();
  for (double& w : model.v) w = std::ldexp(std::nearbyint(std::ldexp(w, 4)), -4);  // few digits: exact in bfloat16
  const FoldError identity =
      fold_value_rotation(plan_of(RotationKind::identity, false), kHidden, DType::bf16, model.v_proj(), model.o_proj());
  CHECK(identity.v_proj == 0.0);
  CHECK(identity.v_proj_before == 0.0);
  CHECK(identity.o_proj == identity.o_proj_before);
  // Eight digits: an error uniform in a last place of 2^-7, of numbers between 1 and 2.
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
             Contains("a centre needs biases"));
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
  // Logits differ by q . center alone, one number for each query and head.
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
