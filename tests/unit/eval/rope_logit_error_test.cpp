#include <kvq/eval/rope_logit_error.h>

#include <kvq/codec/codec.h>
#include <kvq/compute/parallel.h>

#include "support/compare.h"
#include "support/layers.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>
#include <set>

using namespace kvq;

namespace {

struct Layout {
  const char* name;
  int head_dim;
  RopeStyle rope;
};

std::vector<double> frequencies(int rotary_dim) {
  std::vector<double> inv_freq;
  for (int j = 0; j < rotary_dim / 2; ++j) inv_freq.push_back(std::pow(1000.0, -2.0 * j / rotary_dim));
  return inv_freq;
}

std::vector<Layout> layouts() {
  const auto rope = [](RopeLayout layout, int dim, int offset, double factor = 1.0) {
    return RopeStyle{
        .layout = layout,
        .dim = dim,
        .offset = offset,
        .attention_factor = factor,
        .inv_freq = frequencies(dim),
    };
  };
  return {{"half", 16, rope(RopeLayout::half, 16, 0)},
          {"interleaved", 16, rope(RopeLayout::interleaved, 16, 0)},
          {"half, partial", 16, rope(RopeLayout::half, 6, 0)},
          {"interleaved, partial", 16, rope(RopeLayout::interleaved, 6, 0)},
          {"half, partial, with offset", 15, rope(RopeLayout::half, 8, 5)},
          {"interleaved, partial, with offset", 15, rope(RopeLayout::interleaved, 8, 7)},
          {"half, attention factor", 16, rope(RopeLayout::half, 12, 2, 1.3)},
          {"none", 15, {}}};
}

/// R_D as a matrix [n, n] for column vectors, by formats/dump.md; `factor` is the attention factor.
std::vector<double> rotation_matrix(const RopeStyle& rope, int n, double position, double factor) {
  std::vector<double> matrix = test::identity(n);
  if (rope.layout == RopeLayout::none) return matrix;
  for (int j = 0; j < rope.dim / 2; ++j) {
    const int a = rope.layout == RopeLayout::half ? rope.offset + j : rope.offset + 2 * j;
    const int b = rope.layout == RopeLayout::half ? a + rope.dim / 2 : a + 1;
    const double angle = position * rope.inv_freq[static_cast<std::size_t>(j)];
    const auto at = [&](int row, int column) -> double& { return matrix[static_cast<std::size_t>(row * n + column)]; };
    at(a, a) = factor * std::cos(angle);
    at(a, b) = -factor * std::sin(angle);
    at(b, a) = factor * std::sin(angle);
    at(b, b) = factor * std::cos(angle);
  }
  return matrix;
}

std::vector<double> times(const std::vector<double>& matrix, const std::vector<double>& x) {
  std::vector<double> y(x.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i)
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += matrix[i * x.size() + j] * x[j];
  return y;
}

void set_rows(ActivationTensor& tensor, const std::vector<float>& rows) {
  tensor.dtype = DType::f32;
  tensor.raw.resize(rows.size() * sizeof(float));
  std::memcpy(tensor.raw.data(), rows.data(), tensor.raw.size());
}

std::vector<double> row_of(const std::vector<float>& rows, std::size_t row, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  return {rows.begin() + static_cast<std::ptrdiff_t>(row * d),
          rows.begin() + static_cast<std::ptrdiff_t>((row + 1) * d)};
}

LayerActivations layer_of(const Layout& layout, std::vector<std::int64_t> lengths = {13, 1, 31}) {
  LayerActivations layer = test::make_layer({.head_dim = layout.head_dim, .lengths = std::move(lengths)});
  layer.geometry.rope = layout.rope;
  for (auto& position : layer.positions) position = 5 * position + 1000;  // positions may have gaps
  return layer;
}

/// A layer before RoPE: rows [T, H, D] of q and of the keys' error, and the dump's layer made from them.
struct Known {
  LayerActivations layer;
  std::vector<float> q, error;
  std::vector<float> error_after_rope;  ///< [Hkv, P, D]
};

Known known_layer(const Layout& layout, const std::vector<TokenPair>& pairs) {
  Known known{layer_of(layout), {}, {}, {}};
  LayerActivations& layer = known.layer;
  const auto d = static_cast<std::size_t>(layout.head_dim), tokens = static_cast<std::size_t>(layer.k.tokens);
  const auto queries = static_cast<std::size_t>(layer.q.heads), heads = static_cast<std::size_t>(layer.k.heads);
  known.q = test::gaussian(tokens * queries * d, 11);
  known.error = test::gaussian(tokens * heads * d, 12, 0.1);
  std::vector<float> q = known.q, error = known.error;
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t h = 0; h < queries; ++h)
      apply_rope(layout.rope, layer.positions[t], q.data() + (t * queries + h) * d);
    for (std::size_t h = 0; h < heads; ++h)
      apply_rope(layout.rope, layer.positions[t], error.data() + (t * heads + h) * d);
  }
  set_rows(layer.q, q);
  for (std::size_t h = 0; h < heads; ++h)
    for (const TokenPair& pair : pairs) {
      const auto row =
          error.begin() + static_cast<std::ptrdiff_t>((static_cast<std::size_t>(pair.key) * heads + h) * d);
      known.error_after_rope.insert(known.error_after_rope.end(), row, row + static_cast<std::ptrdiff_t>(d));
    }
  return known;
}

/// The metric by its definition, with rotation matrices, in double; of each KV head.
std::vector<double> naive(const Known& known, const std::vector<TokenPair>& pairs) {
  const LayerGeometry& g = known.layer.geometry;
  const int group = g.num_q_heads / g.num_kv_heads;
  std::vector<double> sums(static_cast<std::size_t>(g.num_kv_heads), 0.0);
  for (int i = 0; i < 50; ++i) {
    const double offset = -1024.0 + 2048.0 / 49.0 * i;
    const auto rotation =
        rotation_matrix(g.rope, g.head_dim, offset, g.rope.attention_factor * g.rope.attention_factor);
    for (const TokenPair& pair : pairs)
      for (int head = 0; head < g.num_q_heads; ++head) {
        const int kv_head = head / group;
        const auto q = row_of(known.q, static_cast<std::size_t>(pair.query * g.num_q_heads + head), g.head_dim);
        const auto e = times(
            rotation, row_of(known.error, static_cast<std::size_t>(pair.key * g.num_kv_heads + kv_head), g.head_dim));
        double logit = 0.0;
        for (std::size_t c = 0; c < q.size(); ++c) logit += q[c] * e[c];
        sums[static_cast<std::size_t>(kv_head)] += std::abs(logit);
      }
  }
  for (double& sum : sums) sum /= 50.0 * group * static_cast<double>(pairs.size());
  return sums;
}

std::vector<float> added(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> sum(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  return sum;
}

TensorPlan uniform_plan(int bits, int dim, int heads) {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = bits, .group_size = dim};
  plan.clip_ratio.assign(static_cast<std::size_t>(heads), 1.0);
  return plan;
}

}  // namespace

TEST_CASE("Every query has a key of its own", "[eval]") {
  const std::int64_t tokens = GENERATE(1, 2, 45, 447, 7919);
  CAPTURE(tokens);
  std::set<std::int64_t> queries, keys;
  for (const TokenPair& pair : choose_pairs(tokens, {.pairs = 10000})) {
    queries.insert(pair.query);
    keys.insert(pair.key);
    if (tokens != 7919) REQUIRE(pair.key == (7919 * pair.query + 13) % tokens);
  }
  REQUIRE(static_cast<std::int64_t>(queries.size()) == tokens);
  REQUIRE(keys == queries);
}

TEST_CASE("Of many tokens, as many pairs as wanted are taken from all over the dump", "[eval]") {
  const auto pairs = choose_pairs(100003, {.pairs = 7}), other = choose_pairs(100003, {.pairs = 7, .seed = 5});
  REQUIRE(pairs.size() == 7);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    REQUIRE(pairs[i].query == static_cast<std::int64_t>(i) * 100003 / 7);
    REQUIRE(pairs[i].key == (7919 * pairs[i].query + 13) % 100003);
    REQUIRE(other[i].query == pairs[i].query);
    REQUIRE(other[i].key == (pairs[i].key + 5 * 104729) % 100003);
  }
  REQUIRE(choose_pairs(45, {.seed = ~std::uint64_t{0}}).size() == 45);
}

TEST_CASE("The offsets are 50 even steps from -1024 to 1024", "[eval]") {
  const std::vector<double> offsets = rope_offsets();
  REQUIRE(offsets.size() == 50);
  REQUIRE(offsets.front() == -1024.0);
  REQUIRE(offsets.back() == 1024.0);
  for (std::size_t i = 1; i < offsets.size(); ++i) REQUIRE(offsets[i] - offsets[i - 1] == Approx(2048.0 / 49.0));
}

TEST_CASE("The error is the paper's formula with explicit rotation matrices, before RoPE", "[eval]") {
  for (const Layout& layout : layouts())
    for (const std::int64_t most : {45, 9}) {
      CAPTURE(layout.name, most);
      const RopeLogitRequest request{.pairs = most, .seed = 3};
      const auto pairs = choose_pairs(45, request);
      const Known known = known_layer(layout, pairs);
      const std::vector<double> expected = naive(known, pairs);
      const RopeLogitMae found = RopeLogitError(known.layer, request).of_error(known.error_after_rope);
      REQUIRE(test::relative_difference(found.kv_head, expected) < 1e-6);
      REQUIRE(found.mean == Approx((expected[0] + expected[1]) / 2.0).epsilon(1e-6));
    }
}

TEST_CASE("The error is a norm of k - k_hat", "[eval]") {
  const LayerActivations layer = layer_of(layouts()[4]);
  const RopeLogitError error(layer, {});
  const std::vector<float> a = test::gaussian(error.keys().size(), 1), b = test::gaussian(error.keys().size(), 2);
  const double of_a = error.of_error(a).mean, of_b = error.of_error(b).mean, of_sum = error.of_error(added(a, b)).mean;
  REQUIRE(of_a > 0.0);
  REQUIRE(error.of_error(added(a, a)).mean == 2.0 * of_a);
  REQUIRE(error.of_error(std::vector<float>(a.size(), 0.0f)).mean == 0.0);
  REQUIRE(of_sum > 0.0);
  REQUIRE(of_sum <= (of_a + of_b) * (1.0 + 1e-9));
}

TEST_CASE("Without RoPE the offsets do not matter", "[eval]") {
  const LayerActivations layer = layer_of(layouts().back());
  const RopeLogitError error(layer, {});
  const std::vector<float> e = test::gaussian(error.keys().size(), 1);
  const std::size_t d = static_cast<std::size_t>(layer.geometry.head_dim), count = error.pairs().size();
  double sum = 0.0;
  std::vector<float> q(d);
  for (std::size_t i = 0; i < count; ++i)
    for (int head = 0; head < 4; ++head) {
      layer.q.load_head(head, error.pairs()[i].query, 1, q.data());
      double logit = 0.0;
      for (std::size_t c = 0; c < d; ++c)
        logit += double{q[c]} * e[(static_cast<std::size_t>(head / 2) * count + i) * d + c];
      sum += std::abs(logit);
    }
  REQUIRE(error.of_error(e).mean == Approx(sum / (4.0 * static_cast<double>(count))).epsilon(1e-9));
}

namespace {

RopeLogitMae of_plan(const RopeLogitError& error, const LayerActivations& layer, const TensorPlan& plan) {
  return error.of_stored(*stored_by_plan(plan, layer.geometry.head_dim, {}));
}

}  // namespace

TEST_CASE("A plan's error is that of the rows the codec gives back", "[eval]") {
  const LayerActivations layer = layer_of(layouts()[2], {101, 53});
  const RopeLogitError error(layer, {.pairs = 131});
  TensorPlan plan = uniform_plan(2, 16, 2);
  plan.rotation.kind = RotationKind::dense;
  for (const std::uint64_t head : {1, 2})
    for (const double value : test::random_orthogonal(16, head))
      plan.rotation.matrix.push_back(static_cast<float>(value));
  const bool joint = GENERATE(false, true);
  CAPTURE(joint);
  plan.centroids = Centroids{.count = 5, .joint = joint, .values = test::gaussian(2 * 5 * 16, 3), .inertia = {}};
  std::vector<float> rows(error.keys().begin(), error.keys().end()), difference(rows.size());
  reconstruct_heads(plan, 2, rows, 16);
  for (std::size_t i = 0; i < rows.size(); ++i) difference[i] = error.keys()[i] - rows[i];
  const RopeLogitMae found = of_plan(error, layer, plan), expected = error.of_error(difference);
  REQUIRE(found.mean > 0.0);
  REQUIRE(found.mean == expected.mean);
  REQUIRE(found.kv_head == expected.kv_head);
}

TEST_CASE("Keys are those of the pairs, after RoPE as the layer has them", "[eval]") {
  const LayerActivations layer = layer_of(layouts()[0]);
  const RopeLogitError error(layer, {.pairs = 20});
  std::vector<float> expected;
  for (const int head : {0, 1})
    for (const TokenPair& pair : error.pairs()) {
      expected.resize(expected.size() + 16);
      layer.k.load_head(head, pair.key, 1, expected.data() + expected.size() - 16);
    }
  REQUIRE(test::first_bit_difference(error.keys(), expected) == "");
}

TEST_CASE("Exact keys leave nothing but their rounding to bfloat16", "[eval]") {
  const TensorPlan exact;
  LayerActivations layer = layer_of(layouts()[0]);
  const RopeLogitError error(layer, {});
  const double largest = of_plan(error, layer, uniform_plan(8, 16, 2)).mean, found = of_plan(error, layer, exact).mean;
  REQUIRE(found > 0.0);
  REQUIRE(found < largest);

  LayerActivations narrow = test::make_layer({.dtype = DType::bf16});
  narrow.geometry.rope = layer.geometry.rope;
  REQUIRE(of_plan(RopeLogitError(narrow, {}), narrow, exact).mean == 0.0);
}

TEST_CASE("More bits leave less error, and threads change nothing", "[eval]") {
  const LayerActivations layer = layer_of(layouts()[0], {150});
  std::vector<double> by_bits;
  for (const int bits : {1, 2, 3, 4}) {
    const TensorPlan plan = uniform_plan(bits, 16, 2);
    const auto measured = [&](int threads) {
      const ThreadLimit limit(threads);
      return of_plan(RopeLogitError(layer, {}), layer, plan).kv_head;
    };
    const std::vector<double> one = measured(1);
    REQUIRE(measured(3) == one);
    by_bits.push_back(one[0] + one[1]);
  }
  for (std::size_t i = 1; i < by_bits.size(); ++i) REQUIRE(by_bits[i] < by_bits[i - 1]);
}
