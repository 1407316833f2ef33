#include <kvq/eval/attention_error.h>

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/eval/scheme.h>

#include "support/error_of.h"
#include "support/layers.h"
#include "support/matrix.h"
#include "support/naive_attention_error.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>

using namespace kvq;

namespace {

using Rows = std::vector<float>;

/// Describes the first number whose bits differ; empty if all bits are equal.
std::string first_difference(const LayerError& a, const LayerError& b) {
  if (a.heads.size() != b.heads.size()) return "number of heads";
  if (a.projected_error != b.projected_error || a.projected_energy != b.projected_energy) return "projected";
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    const HeadError &x = a.heads[h], &y = b.heads[h];
    if (x.k_error != y.k_error || x.k_energy != y.k_energy) return fmt::format("head {}: keys", h);
    if (x.v_error != y.v_error || x.v_energy != y.v_energy) return fmt::format("head {}: values", h);
    if (x.divergence != y.divergence) return fmt::format("head {}: divergence of queries", h);
    if (x.buckets.size() != y.buckets.size()) return fmt::format("head {}: number of buckets", h);
    for (std::size_t bucket = 0; bucket < x.buckets.size(); ++bucket) {
      const auto left = test::numbers_of(x.buckets[bucket]), right = test::numbers_of(y.buckets[bucket]);
      for (std::size_t i = 0; i < test::kAttentionSums; ++i)
        if (left[i] != right[i])
          return fmt::format("head {}, bucket {}: {}: {} and {}", h, bucket, test::kAttentionSumNames[i], left[i],
                             right[i]);
    }
  }
  return {};
}

// ---- Ways to store rows.

/// Rows changed by a function of their position, with any choice of exact tokens.
class MadeUpSide : public StoredSide {
 public:
  using Change = std::function<void(std::int64_t first, int kv_head, std::span<float> rows)>;
  MadeUpSide(Change change, ExactTokens tokens) : change_(std::move(change)), tokens_(tokens) {}
  void restore(const ActivationTensor&, std::int64_t first, int kv_head, std::span<float> rows) const override {
    change_(first, kv_head, rows);
  }
  ExactTokens exact_tokens() const override { return tokens_; }
  double effective_bits(std::int64_t) const override { return 16.0; }
  double code_bits() const override { return 16.0; }

 private:
  Change change_;
  ExactTokens tokens_;
};

std::unique_ptr<StoredSide> noisy(double size, std::uint64_t seed, ExactTokens tokens = {}) {
  const auto change = [size, seed](std::int64_t first, int kv_head, std::span<float> rows) {
    const auto noise = test::gaussian_double(
        rows.size(), seed + 100 * static_cast<std::uint64_t>(first) + static_cast<std::uint64_t>(kv_head), size);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(double{rows[i]} + noise[i]);
  };
  return std::make_unique<MadeUpSide>(change, tokens);
}

/// A storage that owns its plan.
class PlanSide : public StoredSide {
 public:
  PlanSide(TensorPlan plan, int dim, Windows windows)
      : plan_(std::move(plan)), stored_(stored_by_plan(plan_, dim, windows)) {}
  void restore(const ActivationTensor& tensor, std::int64_t first, int kv_head, std::span<float> rows) const override {
    stored_->restore(tensor, first, kv_head, rows);
  }
  ExactTokens exact_tokens() const override { return stored_->exact_tokens(); }
  double effective_bits(std::int64_t context) const override { return stored_->effective_bits(context); }
  double code_bits() const override { return stored_->code_bits(); }

 private:
  TensorPlan plan_;
  std::unique_ptr<StoredSide> stored_;
};

TensorPlan affine_plan(int bits, int dim, int heads) {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = bits, .group_size = dim};
  plan.clip_ratio.assign(static_cast<std::size_t>(heads), 1.0);
  return plan;
}

TensorPlan centered_plan(int bits, int dim, int heads) {
  TensorPlan plan = affine_plan(bits, dim, heads);
  plan.center = test::gaussian(static_cast<std::size_t>(heads * dim), 71, 0.3);
  plan.rotation.kind = RotationKind::dense;
  for (int head = 0; head < heads; ++head)
    for (const double value : test::random_orthogonal(dim, static_cast<std::uint64_t>(head) + 1))
      plan.rotation.matrix.push_back(static_cast<float>(value));
  plan.clip_ratio.assign(static_cast<std::size_t>(heads), 0.9);
  return plan;
}

TensorPlan joint_plan(int bits, int dim, int heads) {
  TensorPlan plan = affine_plan(bits, dim, heads);
  plan.centroids = Centroids{
      .count = 5,
      .joint = true,
      .values = test::gaussian(static_cast<std::size_t>(heads * 5 * dim), 72),
      .inertia = {},
  };
  return plan;
}

/// A way to store a layer, with a name for failures.
struct Way {
  std::string name;
  StoredLayer stored;
};

Way scheme_way(const LayerActivations& layer, const std::string& name) {
  return {name, find_scheme(name).of_layer(layer.geometry, layer.layer, 5)};
}

Way plan_way(const LayerActivations& layer, const std::string& name,
             const std::function<TensorPlan(int bits, int dim, int heads)>& plan, Windows windows = {}) {
  const LayerGeometry& g = layer.geometry;
  StoredLayer stored{std::make_unique<PlanSide>(plan(2, g.head_dim, g.num_kv_heads), g.head_dim, windows), nullptr};
  if (layer.v) stored.v = std::make_unique<PlanSide>(plan(3, g.v_head_dim, g.num_kv_heads), g.v_head_dim, windows);
  return {name, std::move(stored)};
}

std::vector<Way> all_ways(const LayerActivations& layer) {
  std::vector<Way> ways;
  for (const char* name : {"naive-int2", "naive-int3-k", "bf16", "tq-mse-4", "turboquant-qjl-3", "kivi-2", "kivi-4-r32",
                           "kivi-4-r32-k", "kivi-scale-only-2", "fp8", "fp8-head-k", "nvfp4"})
    ways.push_back(scheme_way(layer, name));
  ways.push_back({"none", StoredLayer{}});
  Way values = scheme_way(layer, "naive-int2");
  values.name = "values of naive-int2";
  values.stored.k = nullptr;
  ways.push_back(std::move(values));
  Way mixed = scheme_way(layer, "kivi-3");
  mixed.name = "keys of naive-int3, values of kivi-3";
  mixed.stored.k = std::move(scheme_way(layer, "naive-int3").stored.k);
  ways.push_back(std::move(mixed));
  ways.push_back(plan_way(layer, "centered, windows 4 + 8", centered_plan, {.sink_tokens = 4, .recent_tokens = 8}));
  ways.push_back(plan_way(layer, "affine, window 64", affine_plan, {.sink_tokens = 0, .recent_tokens = 64}));
  ways.push_back(plan_way(layer, "affine, sink 1", affine_plan, {.sink_tokens = 1, .recent_tokens = 0}));
  ways.push_back(plan_way(layer, "affine, windows of more than a sequence", affine_plan,
                          {.sink_tokens = 40000, .recent_tokens = 40000}));
  ways.push_back(plan_way(layer, "joint centroids", joint_plan));
  ways.push_back(
      plan_way(layer, "joint centroids, windows 64 + 1", joint_plan, {.sink_tokens = 64, .recent_tokens = 1}));
  ways.push_back({"windows of its own on each side",
                  {noisy(0.1, 7, {.sink = 3, .recent = 5, .granule = 16}),
                   noisy(0.2, 8, {.sink = 0, .recent = 70, .granule = 1})}});
  ways.push_back({"granules of 100",
                  {noisy(0.3, 9, {.sink = 0, .recent = 0, .granule = 100}),
                   noisy(0.3, 10, {.sink = 65, .recent = 1, .granule = 7})}});
  ways.push_back({"granules of 7 and 100",
                  {noisy(0.3, 15, {.sink = 65, .recent = 0, .granule = 7}),
                   noisy(0.3, 16, {.sink = 1, .recent = 0, .granule = 100})}});
  ways.push_back({"errors of 1e-5", {noisy(1e-5, 11), noisy(1e-5, 12)}});
  ways.push_back({"large errors", {noisy(3.0, 13), noisy(3.0, 14)}});
  return ways;
}

// ---- Layers.

/// Adds a positive definite G to each query head: A A^T / Dv.
void add_curvature(LayerActivations& layer) {
  const int dim = layer.geometry.v_head_dim;
  for (int head = 0; head < layer.geometry.num_q_heads; ++head) {
    const auto a = test::gaussian_double(static_cast<std::size_t>(dim * dim), static_cast<std::uint64_t>(head) + 400);
    for (const double value : test::multiply(a, test::transpose(a, dim), dim))
      layer.output_curvature.push_back(static_cast<float>(value / dim));
  }
}

void add_projection(LayerActivations& layer, int rows) {
  layer.o_proj_rows = rows;
  layer.o_proj =
      test::gaussian(static_cast<std::size_t>(rows * layer.geometry.num_q_heads * layer.geometry.v_head_dim), 500, 0.2);
}

// ---- Measurements.

std::vector<LayerError> measure(const LayerActivations& layer, std::vector<Way>& ways, bool with_windows = true) {
  std::vector<StoredLayer> stored;
  for (Way& way : ways) stored.push_back(std::move(way.stored));
  std::vector<LayerError> found = attention_errors(layer, stored, with_windows, {}, true);
  for (std::size_t i = 0; i < ways.size(); ++i) ways[i].stored = std::move(stored[i]);
  return found;
}

/// Checks that all measured numbers of these ways equal the definitions.
void check_ways(const LayerActivations& layer, std::vector<Way> ways, bool with_windows = true) {
  const std::vector<LayerError> found = measure(layer, ways, with_windows);
  REQUIRE(found.size() == ways.size());
  for (std::size_t i = 0; i < ways.size(); ++i) {
    INFO("stored as " << ways[i].name << ", with windows " << with_windows);
    CHECK(test::first_disagreement(found[i], test::naive_attention_errors(layer, ways[i].stored, with_windows)) == "");
  }
}

LayerError measure_one(const LayerActivations& layer, StoredLayer stored, bool with_windows = true) {
  return attention_errors(layer, std::span<const StoredLayer>(&stored, 1), with_windows, {}, true).at(0);
}

const std::vector<std::int64_t> kManyLengths = {1, 2, 63, 64, 65, 130, 300};

/// A layer with logits of about 20, up to 80.
LayerActivations sharp_layer() {
  LayerActivations layer = test::make_layer({.lengths = {300, 65}, .softmax_scale = 5.0, .seed = 7});
  add_curvature(layer);
  add_projection(layer, 20);
  return layer;
}

void set_rows(ActivationTensor& tensor, const Rows& rows) {
  tensor.dtype = DType::f32;
  tensor.raw.resize(rows.size() * sizeof(float));
  std::memcpy(tensor.raw.data(), rows.data(), tensor.raw.size());
}

}  // namespace

TEST_CASE("Context buckets begin at 0 and 64 and grow fourfold", "[eval]") {
  const auto edges = context_edges();
  REQUIRE(edges.size() >= 4);
  CHECK(edges[0] == 0);
  CHECK(edges[1] == 64);
  for (std::size_t b = 2; b < edges.size(); ++b) CHECK(edges[b] == 4 * edges[b - 1]);
}

TEST_CASE("Attention sums add up field by field, and a head's total is the sum of its buckets", "[eval]") {
  const AttentionSums a{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, {1, 2, 3, 4}},
      b{10, 200, 3000, 4e4, 5e5, 6e6, 7e7, 8e8, 9e9, 1e11, {10, 200, 3000, 4e4}};
  AttentionSums sum = a;
  sum += b;
  for (std::size_t i = 0; i < test::kAttentionSums; ++i)
    CHECK(test::numbers_of(sum)[i] == test::numbers_of(a)[i] + test::numbers_of(b)[i]);
  HeadError head;
  CHECK(test::numbers_of(head.total()) == test::numbers_of(AttentionSums{}));
  head.buckets = {a, b, a};
  for (std::size_t i = 0; i < test::kAttentionSums; ++i)
    CHECK(test::numbers_of(head.total())[i] == 2.0 * test::numbers_of(a)[i] + test::numbers_of(b)[i]);
}

TEST_CASE("Attention errors are their definitions: many sequences, every way to store them", "[eval]") {
  LayerActivations layer = test::make_layer({.lengths = kManyLengths});
  add_curvature(layer);
  add_projection(layer, 37);
  check_ways(layer, all_ways(layer));
}

TEST_CASE("Attention errors are their definitions: capped logits and learned sinks", "[eval]") {
  for (const double cap : {0.0, 1.5, 20.0})
    for (const bool sinks : {false, true}) {
      if (cap == 0.0 && !sinks) continue;
      INFO("cap " << cap << ", sinks " << sinks);
      LayerActivations layer = test::make_layer({.lengths = {1, 65, 130}, .softmax_scale = 1.0, .seed = 5});
      layer.geometry.logit_softcap = cap;
      if (sinks) layer.geometry.sink_logits = {0.5, -4.0, 3.0, 9.0};
      add_curvature(layer);
      check_ways(layer, all_ways(layer));
    }
}

TEST_CASE("Attention errors are their definitions: outputs projected in several passes", "[eval]") {
  // A pass takes 512 tokens: the first sequence takes three passes, two sequences share a pass, the last takes two
  // passes.
  LayerActivations layer = test::make_layer({.num_q_heads = 2, .lengths = {1057, 300, 200, 512, 3, 530}, .seed = 21});
  const auto ways_of = [&] {
    std::vector<Way> ways;
    for (const char* name : {"naive-int2", "kivi-2", "kivi-scale-only-2"}) ways.push_back(scheme_way(layer, name));
    ways.push_back(plan_way(layer, "affine, windows", affine_plan, {.sink_tokens = 32, .recent_tokens = 128}));
    return ways;
  };
  std::vector<Way> bare_ways = ways_of();
  const std::vector<LayerError> bare = measure(layer, bare_ways);
  add_projection(layer, 150);
  check_ways(layer, ways_of());
  check_ways(layer, ways_of(), false);
  std::vector<Way> ways = ways_of();
  std::vector<LayerError> found = measure(layer, ways);
  for (std::size_t i = 0; i < ways.size(); ++i) {
    INFO("stored as " << ways[i].name);
    CHECK(found[i].projected_error > 0.0);
    found[i].projected_error = found[i].projected_energy = 0.0;
    CHECK(first_difference(found[i], bare[i]) == "");
  }
}

TEST_CASE("Attention errors are their definitions: without windows every token is read as stored", "[eval]") {
  LayerActivations layer = test::make_layer({.lengths = {130, 31, 65}, .seed = 2});
  add_curvature(layer);
  add_projection(layer, 5);
  check_ways(layer, all_ways(layer), false);
}

TEST_CASE("Attention errors are their definitions: one sequence of any length", "[eval]") {
  for (const std::int64_t length : {1, 2, 10, 11, 12, 63, 64, 65, 128, 129}) {
    CAPTURE(length);
    LayerActivations layer = test::make_layer({.lengths = {length}, .seed = static_cast<std::uint64_t>(length)});
    add_projection(layer, 3);
    check_ways(layer, all_ways(layer));
  }
}

TEST_CASE("Attention errors are their definitions: query heads per KV head, dimensions and data types", "[eval]") {
  struct Shape {
    int q_heads, kv_heads, dim, v_dim;
    DType dtype;
    double scale;
  };
  for (const Shape& shape :
       {Shape{2, 2, 64, 64, DType::f32, 0.125}, Shape{4, 2, 24, 40, DType::f16, 0.7},
        Shape{4, 1, 128, 32, DType::bf16, 0.05}, Shape{8, 2, 16, 1, DType::f16, 0.25},
        Shape{3, 1, 80, 96, DType::bf16, 0.11180339887498948}, Shape{1, 1, 2, 2, DType::f32, 1.0}}) {
    CAPTURE(shape.q_heads, shape.kv_heads, shape.dim, shape.v_dim, shape.scale);
    LayerActivations layer = test::make_layer({
        .layer = 3,
        .num_q_heads = shape.q_heads,
        .num_kv_heads = shape.kv_heads,
        .head_dim = shape.dim,
        .v_head_dim = shape.v_dim,
        .lengths = {65, 130, 3},
        .dtype = shape.dtype,
        .softmax_scale = shape.scale,
        .seed = 3,
    });
    add_curvature(layer);
    add_projection(layer, 11);
    check_ways(layer, all_ways(layer));
  }
}

TEST_CASE("Attention errors are their definitions: sliding windows", "[eval]") {
  for (const int window : {1, 5, 10, 11, 63, 64, 65, 100, 1000}) {
    CAPTURE(window);
    LayerActivations layer =
        test::make_layer({.num_q_heads = 2, .lengths = {200, 2, 65}, .sliding_window = window, .seed = 4});
    add_curvature(layer);
    check_ways(layer, all_ways(layer), window % 2 == 1);
    if (window == 5 || window == 64) check_ways(layer, all_ways(layer), window == 64);
  }
}

TEST_CASE("Attention errors are their definitions: contexts up to the fifth bucket", "[eval]") {
  const LayerActivations layer = test::make_layer({
      .num_q_heads = 1,
      .num_kv_heads = 1,
      .head_dim = 8,
      .v_head_dim = 4,
      .lengths = {4099, 1025},
      .softmax_scale = 0.35,
      .seed = 5,
  });
  std::vector<Way> ways;
  ways.push_back(scheme_way(layer, "kivi-2"));
  ways.push_back(plan_way(layer, "affine, windows", affine_plan, {.sink_tokens = 32, .recent_tokens = 128}));
  check_ways(layer, std::move(ways));
}

TEST_CASE("Attention errors are their definitions: channels of very different size", "[eval]") {
  LayerActivations layer = test::make_layer(
      {.head_dim = 32, .v_head_dim = 32, .lengths = {150, 70}, .softmax_scale = 0.02, .seed = 6, .outliers = true});
  add_curvature(layer);
  add_projection(layer, 20);
  check_ways(layer, all_ways(layer));
}

TEST_CASE("Attention errors are their definitions: sharp attention", "[eval]") {
  const LayerActivations layer = sharp_layer();
  std::vector<Way> ways = all_ways(layer);
  std::erase_if(ways, [](const Way& way) { return way.name == "large errors"; });
  check_ways(layer, std::move(ways));
}

TEST_CASE("Attention errors are their definitions: stored keys win where the exact weight leaves the range of float",
          "[eval]") {
  // Two keys with logits 0 and -200, stored as 0 and 100: the weights 1 and e^-200 become e^-100 and 1.
  LayerActivations layer = test::make_layer(
      {.num_q_heads = 1, .num_kv_heads = 1, .head_dim = 4, .v_head_dim = 4, .lengths = {2}, .softmax_scale = 1.0});
  set_rows(layer.q, {0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f, 0.0f});
  set_rows(layer.k, {0.0f, 1.0f, 0.0f, 0.0f, -200.0f, 0.0f, 0.0f, 0.0f});
  set_rows(*layer.v, {1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f});
  const auto lift = [](std::int64_t, int, std::span<float> rows) { rows[4] = 100.0f; };
  const AttentionSums total =
      measure_one(layer, {std::make_unique<MadeUpSide>(lift, ExactTokens{}), nullptr}).heads.at(0).total();
  CHECK(total.divergence == Approx(100.0).epsilon(1e-6));
  CHECK(total.output_error == Approx(2.0).epsilon(1e-6));
  CHECK(total.logit_error == Approx(90000.0).epsilon(1e-6));

  const LayerActivations sharp = sharp_layer();
  std::vector<Way> ways;
  ways.push_back({"large errors", {noisy(3.0, 13), noisy(3.0, 14)}});
  check_ways(sharp, std::move(ways));
}

TEST_CASE("Squares of logits and values may leave the range of float", "[eval]") {
  // Logits of about 2^10 and 2^70: float products, and so all sums, differ only by a power of two.
  const auto scaled = [](int exponent) {
    LayerActivations layer = test::make_layer({.lengths = {130, 65}, .softmax_scale = 1.0, .seed = 22});
    for (ActivationTensor* tensor : {&layer.q, &layer.k, &*layer.v}) {
      Rows rows(tensor->raw.size() / sizeof(float));
      std::memcpy(rows.data(), tensor->raw.data(), tensor->raw.size());
      for (float& x : rows) x = std::ldexp(x, tensor == &*layer.v ? 2 * exponent : exponent);
      set_rows(*tensor, rows);
    }
    const auto bend = [](std::int64_t, int, std::span<float> rows) {
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] *= i % 3 == 0 ? 1.0625f : 1.0f;
    };
    StoredLayer stored{std::make_unique<MadeUpSide>(bend, ExactTokens{}),
                       std::make_unique<MadeUpSide>(bend, ExactTokens{})};
    return measure_one(layer, std::move(stored));
  };
  const LayerError small = scaled(5), large = scaled(35);
  for (std::size_t h = 0; h < small.heads.size(); ++h) {
    const AttentionSums a = small.heads[h].total(), b = large.heads[h].total();
    CHECK(b.logit_energy == Approx(std::ldexp(a.logit_energy, 120)).epsilon(1e-6));
    CHECK(b.logit_error == Approx(std::ldexp(a.logit_error, 120)).epsilon(1e-6));
    CHECK(large.heads[h].k_error == Approx(std::ldexp(small.heads[h].k_error, 60)).epsilon(1e-6));
    CHECK(large.heads[h].v_energy == Approx(std::ldexp(small.heads[h].v_energy, 120)).epsilon(1e-6));
    CHECK(b.output_energy ==
          Approx(std::ldexp(a.output_energy, 120)).epsilon(0.01));  // nearly all rows have one weight of 1
    CHECK(b.sv_error == Approx(std::ldexp(a.sv_error, 120)).epsilon(0.01));
    CHECK((std::isfinite(b.output_error) && b.output_error > 0.0));
    CHECK((std::isfinite(b.divergence) && b.divergence > 0.0));
  }
}

TEST_CASE("Attention errors are their definitions: a layer without values", "[eval]") {
  const LayerActivations layer =
      test::make_layer({.num_q_heads = 4, .num_kv_heads = 1, .lengths = {130, 65, 1}, .has_values = false, .seed = 8});
  std::vector<Way> ways = all_ways(layer);
  const std::vector<LayerError> found = measure(layer, ways);
  for (std::size_t i = 0; i < ways.size(); ++i) {
    INFO("stored as " << ways[i].name);
    CHECK(test::first_disagreement(found[i], test::naive_attention_errors(layer, ways[i].stored, true)) == "");
    const AttentionSums total = found[i].heads.at(0).total();
    CHECK(total.logit_energy > 0.0);
    CHECK(total.queries == 4.0 * 196.0);
    CHECK(total.sv_error + total.output_error + total.output_energy + total.curved_error == 0.0);
    CHECK(found[i].heads[0].v_error + found[i].heads[0].v_energy + found[i].projected_error +
              found[i].projected_energy ==
          0.0);
  }
}

TEST_CASE("The ten largest weights are the earlier keys where weights are equal", "[eval]") {
  // Logits are small multiples of 1/8, exact and stored, so that nothing rounds and many logits are equal.
  constexpr std::int64_t kTokens = 400;
  LayerActivations layer = test::make_layer({
      .num_q_heads = 1,
      .num_kv_heads = 1,
      .head_dim = 4,
      .v_head_dim = 4,
      .lengths = {kTokens},
      .softmax_scale = 0.5,
  });
  for (const int levels : {1, 2, 4, 40}) {
    CAPTURE(levels);
    test::Random random(static_cast<std::uint64_t>(levels));
    std::vector<float> exact, stored;
    Rows q, k;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      exact.push_back(0.25f * static_cast<float>(random.integer(1, levels)));
      stored.push_back(0.25f * static_cast<float>(random.integer(0, levels)));
      q.insert(q.end(), {1.0f, 0.0f, 0.0f, 0.0f});
      k.insert(k.end(), {exact.back(), 0.0f, 0.0f, 0.0f});
    }
    set_rows(layer.q, q);
    set_rows(layer.k, k);
    const auto replace = [&](std::int64_t, int, std::span<float> rows) {
      for (std::size_t row = 0; row < stored.size(); ++row) rows[4 * row] = stored[row];
    };
    const auto top_ten = [](const std::vector<float>& logits, std::size_t count) {
      std::set<std::size_t> chosen;
      while (chosen.size() < 10) {
        std::size_t best = count;
        for (std::size_t j = 0; j < count; ++j)
          if (!chosen.contains(j) && (best == count || logits[j] > logits[best])) best = j;
        chosen.insert(best);
      }
      return chosen;
    };
    double hits = 0.0;
    for (std::size_t count = 11; count <= static_cast<std::size_t>(kTokens); ++count) {
      const auto before = top_ten(exact, count);
      for (const std::size_t j : top_ten(stored, count)) hits += before.contains(j) ? 1.0 : 0.0;
    }
    const LayerError found = measure_one(layer, {std::make_unique<MadeUpSide>(replace, ExactTokens{}), nullptr});
    CHECK(found.heads.at(0).total().top_queries == static_cast<double>(kTokens - 10));
    CHECK(found.heads.at(0).total().top_hits == hits);
  }
}

TEST_CASE("The ten largest weights count from the eleventh visible key on, also in a sliding window", "[eval]") {
  for (const int window : {0, 9, 10, 11, 12}) {
    CAPTURE(window);
    const LayerActivations layer =
        test::make_layer({.num_q_heads = 1, .num_kv_heads = 1, .lengths = {10, 11, 70}, .sliding_window = window});
    const LayerError found = measure_one(layer, {});
    const double counted = window == 0 || window > 10 ? 1.0 + 60.0 : 0.0;
    CHECK(found.heads.at(0).total().top_queries == counted);
    CHECK(found.heads.at(0).total().top_hits == 10.0 * counted);
  }
}

TEST_CASE("Attention errors do not depend on threads", "[eval]") {
  LayerActivations layer = test::make_layer({.lengths = kManyLengths, .seed = 9});
  add_curvature(layer);
  add_projection(layer, 37);
  std::vector<Way> ways = all_ways(layer);
  const auto measured = [&](int threads) {
    const ThreadLimit limit(threads);
    return measure(layer, ways);
  };
  const std::vector<LayerError> one = measured(1), three = measured(3);
  for (std::size_t i = 0; i < ways.size(); ++i) {
    INFO("stored as " << ways[i].name);
    CHECK(first_difference(one[i], three[i]) == "");
  }
}

TEST_CASE("Ways measured together come out as each one alone", "[eval]") {
  for (const bool has_values : {true, false}) {
    LayerActivations layer = test::make_layer(
        {.num_kv_heads = has_values ? 2 : 1, .lengths = {130, 65, 64}, .has_values = has_values, .seed = 10});
    if (has_values) {
      add_curvature(layer);
      add_projection(layer, 37);
    }
    std::vector<Way> ways = all_ways(layer);
    const std::vector<LayerError> together = measure(layer, ways);
    for (std::size_t i = 0; i < ways.size(); ++i) {
      INFO("stored as " << ways[i].name);
      CHECK(first_difference(together[i], measure_one(layer, std::move(ways[i].stored))) == "");
    }
  }
  CHECK(attention_errors(test::make_layer({}), {}, true).empty());
}

TEST_CASE("Without the sums over contexts all other numbers stay", "[eval]") {
  const LayerActivations layer = test::make_layer({.lengths = {130, 65}, .seed = 12});
  const StoredLayer stored = std::move(scheme_way(layer, "naive-int2").stored);
  const std::span<const StoredLayer> ways(&stored, 1);
  LayerError with = attention_errors(layer, ways, true, {}, true).at(0);
  const LayerError without = attention_errors(layer, ways, true, {}, false).at(0);
  for (HeadError& head : with.heads)
    for (AttentionSums& bucket : head.buckets) bucket.context = {};
  CHECK(first_difference(with, without) == "");
}

TEST_CASE("Rows that come back as they were leave no error at all", "[eval]") {
  LayerActivations layer = test::make_layer({.lengths = {130, 65}, .dtype = DType::bf16, .seed = 11});
  add_curvature(layer);
  add_projection(layer, 37);
  for (const char* name : {"bf16", "bf16-k", "nothing stored"}) {
    CAPTURE(name);
    const LayerError found =
        measure_one(layer, std::string(name) == "nothing stored" ? StoredLayer{} : scheme_way(layer, name).stored);
    CHECK(found.projected_error == 0.0);
    CHECK(found.projected_energy > 0.0);
    for (const HeadError& head : found.heads) {
      const AttentionSums total = head.total();
      CHECK(head.k_error == 0.0);
      CHECK(head.v_error == 0.0);
      CHECK(total.logit_error == 0.0);
      CHECK(total.sv_error == 0.0);
      CHECK(total.output_error == 0.0);
      CHECK(total.curved_error == 0.0);
      CHECK(total.divergence == 0.0);
      CHECK(total.top_hits == 10.0 * total.top_queries);
      CHECK(std::all_of(head.divergence.begin(), head.divergence.end(), [](float kl) { return kl == 0.0f; }));
      CHECK(head.k_energy > 0.0);
      CHECK(head.v_energy > 0.0);
      CHECK(total.logit_energy > 0.0);
      CHECK(total.output_energy > 0.0);
    }
  }
}

TEST_CASE("More bits leave less of every attention error", "[eval]") {
  LayerActivations layer = test::make_layer({.lengths = {300}, .seed = 12});
  add_curvature(layer);
  add_projection(layer, 37);
  // Without kivi-scale-only, whose ranges clip later tokens with any number of bits.
  for (const char* family : {"naive-int", "quarot-int", "symmetric-norm-", "tq-mse-", "kivi-"}) {
    std::vector<Way> ways;
    for (const int bits : {2, 4, 6, 8}) ways.push_back(scheme_way(layer, fmt::format("{}{}", family, bits)));
    const std::vector<LayerError> found = measure(layer, ways);
    for (std::size_t i = 1; i < found.size(); ++i) {
      INFO(ways[i].name);
      CHECK(found[i].projected_error < found[i - 1].projected_error);
      CHECK(found[i].projected_energy == found[i - 1].projected_energy);
      for (std::size_t h = 0; h < 2; ++h) {
        const HeadError &more = found[i].heads[h], &less = found[i - 1].heads[h];
        const AttentionSums a = more.total(), b = less.total();
        CHECK(more.k_error < less.k_error);
        CHECK(more.v_error < less.v_error);
        CHECK(a.logit_error < b.logit_error);
        CHECK(a.sv_error < b.sv_error);
        CHECK(a.output_error < b.output_error);
        CHECK(a.curved_error < b.curved_error);
        CHECK(a.divergence < b.divergence);
        CHECK(a.top_hits > b.top_hits);
        CHECK(a.top_queries == b.top_queries);
        CHECK(a.logit_energy == b.logit_energy);
      }
    }
  }
}

TEST_CASE("Progress rises to 1 on one thread", "[eval]") {
  const LayerActivations layer = test::make_layer({.lengths = kManyLengths});
  std::vector<double> parts;
  std::set<std::thread::id> threads;
  std::mutex guard;
  const std::vector<StoredLayer> none(1);
  const ThreadLimit limit(3);
  attention_errors(layer, none, true, [&](double part) {
    const std::lock_guard lock(guard);
    parts.push_back(part);
    threads.insert(std::this_thread::get_id());
  });
  REQUIRE(!parts.empty());
  CHECK(threads.size() == 1);
  CHECK(std::is_sorted(parts.begin(), parts.end()));
  CHECK(parts.front() >= 0.0);
  CHECK(parts.back() == 1.0);
}

TEST_CASE("Rows that are not finite when they are coded end a measurement", "[eval]") {
  LayerActivations layer = test::make_layer({.dtype = DType::f32});
  const float infinite = HUGE_VALF;
  std::memcpy(layer.k.raw.data() + 100 * sizeof(float), &infinite, sizeof(float));
  for (const char* scheme : {"naive-int3", "quarot-int2", "symmetric-norm-2", "tq-mse-2", "bf16"}) {
    INFO(scheme);
    const auto error = test::error_of([&] { measure_one(layer, scheme_way(layer, scheme).stored); });
    REQUIRE(error.has_value());
    CHECK(error->kind() == ErrorKind::numerical);
  }
}
