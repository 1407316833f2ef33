// Attention gives the same output if keys become k M and queries q M^-T, or values v M and o_proj's columns W M^-T.
// Decisions with a transform must not depend on M: the quantized rows and their error are the same.

#include <kvq/codec/codec.h>
#include <kvq/methods/method.h>
#include <kvq/stats/collect.h>

#include "support/decide.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

using namespace kvq;

namespace {

using Doubles = std::vector<double>;

constexpr int kDim = 32, kHidden = 48;
constexpr std::size_t kSide = kDim;
constexpr std::int64_t kAllTokens =
    1 << 20;  // tokens in the sample; which tokens a smaller sample takes depends on the bytes of the keys

/// A map and its inverse.
struct Map {
  Doubles matrix = test::identity(kDim), inverse = test::identity(kDim);
};

/// Scales from 1 to `condition`, evenly spaced in the logarithm, in random order.
Doubles scales(double condition, std::uint64_t seed) {
  test::Random random(seed);
  Doubles all;
  for (int i = 0; i < kDim; ++i) all.push_back(std::pow(condition, static_cast<double>(i) / (kDim - 1)));
  for (int i = kDim - 1; i > 0; --i)
    std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(random.integer(0, i))]);
  return all;
}

/// Orthogonal x diagonal x orthogonal, with condition number `condition`.
Map any_map(double condition, std::uint64_t seed) {
  const Doubles left = test::random_orthogonal(kDim, seed), right = test::random_orthogonal(kDim, seed + 1),
                s = scales(condition, seed + 2);
  Doubles scaled(left), unscaled(test::transpose(right, kDim));
  for (std::size_t i = 0; i < kSide; ++i)
    for (std::size_t j = 0; j < kSide; ++j) {
      scaled[i * kSide + j] *= s[j];
      unscaled[i * kSide + j] /= s[j];
    }
  return {test::multiply(scaled, right, kDim), test::multiply(unscaled, test::transpose(left, kDim), kDim)};
}

/// A diagonal map; both channels of a rotary pair (i, i + D/2) have the same scale.
Map diagonal_map(double condition, std::uint64_t seed) {
  const Doubles s = scales(condition, seed);
  Map map;
  for (std::size_t i = 0; i < kSide; ++i) {
    map.matrix[i * (kSide + 1)] = s[i % (kSide / 2)];
    map.inverse[i * (kSide + 1)] = 1.0 / s[i % (kSide / 2)];
  }
  return map;
}

std::vector<float> rows_of(const ActivationTensor& tensor) {
  std::vector<float> rows(tensor.raw.size() / sizeof(float));
  std::memcpy(rows.data(), tensor.raw.data(), tensor.raw.size());
  return rows;
}

/// Multiplies rows [.., heads, D] of a float32 buffer by the matrix of their head.
void multiply_rows(std::vector<float>& rows, int heads, const std::vector<const Doubles*>& matrices) {
  for (std::size_t first = 0; first < rows.size(); first += kSide) {
    const Doubles& m = *matrices[first / kSide % static_cast<std::size_t>(heads)];
    Doubles out(kSide, 0.0);
    for (std::size_t i = 0; i < kSide; ++i)
      for (std::size_t j = 0; j < kSide; ++j) out[j] += double{rows[first + i]} * m[i * kSide + j];
    std::copy(out.begin(), out.end(), rows.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

void multiply_tensor(ActivationTensor& tensor, const std::vector<const Doubles*>& matrices) {
  std::vector<float> rows = rows_of(tensor);
  multiply_rows(rows, tensor.heads, matrices);
  std::memcpy(tensor.raw.data(), rows.data(), tensor.raw.size());
}

/// A layer of 1200 tokens whose queries, keys, values and o_proj have different spectra, as in trained models.
LayerActivations correlated_layer(std::uint64_t seed) {
  LayerActivations layer = test::make_layer({
      .num_q_heads = 4,
      .num_kv_heads = 2,
      .head_dim = kDim,
      .v_head_dim = kDim,
      .lengths = {700, 500},
      .softmax_scale = 0.05,
      .seed = seed,
  });
  layer.geometry.rope = {
      .layout = RopeLayout::half,
      .dim = kDim,
      .offset = 0,
      .attention_factor = 1.0,
      .inv_freq = Doubles(kDim / 2, 0.01),
  };
  for (std::size_t i = 0; i < layer.geometry.rope.inv_freq.size(); ++i)
    layer.geometry.rope.inv_freq[i] /= static_cast<double>(i + 1);
  std::vector<Doubles> mixings;
  std::uint64_t draw = seed * 100;
  const auto mixing = [&] {
    mixings.push_back(test::random_covariance(kDim, ++draw, 0.94));
    return static_cast<const Doubles*>(nullptr);
  };
  for (int i = 0; i < 4 + 2 + 2; ++i) mixing();
  const auto pick = [&](std::size_t first, std::size_t count) {
    std::vector<const Doubles*> some;
    for (std::size_t i = 0; i < count; ++i) some.push_back(&mixings[first + i]);
    return some;
  };
  multiply_tensor(layer.q, pick(0, 4));
  multiply_tensor(layer.k, pick(4, 2));
  multiply_tensor(*layer.v, pick(6, 2));
  std::vector<float> k = rows_of(layer.k);  // keys have means, as in real models
  for (std::size_t i = 0; i < k.size(); ++i)
    k[i] += 0.3f * static_cast<float>(std::sin(static_cast<double>(i % (2 * kSide))));
  std::memcpy(layer.k.raw.data(), k.data(), layer.k.raw.size());
  layer.o_proj = test::gaussian(static_cast<std::size_t>(kHidden) * 4 * kSide, seed + 7);
  layer.o_proj_rows = kHidden;
  for (std::size_t i = 0; i < layer.o_proj.size(); ++i)
    layer.o_proj[i] *= static_cast<float>(1.0 + std::cos(static_cast<double>(i % kSide)));
  return layer;
}

/// The same model with other channel scales; attention gives the same output.
struct Rescaled {
  LayerActivations layer;
  std::vector<Map> k, v;  ///< of each KV head
};
Rescaled rescaled(LayerActivations layer, const std::function<Map(std::uint64_t)>& draw) {
  Rescaled result{std::move(layer), {}, {}};
  for (std::uint64_t h = 0; h < 2; ++h) {
    result.k.push_back(draw(1000 + 10 * h));
    result.v.push_back(draw(2000 + 10 * h));
  }
  std::vector<Doubles> dual_k, dual_v;
  for (std::size_t q = 0; q < 4; ++q) {
    dual_k.push_back(test::transpose(result.k[q / 2].inverse, kDim));
    dual_v.push_back(test::transpose(result.v[q / 2].inverse, kDim));
  }
  const auto all = [](const std::vector<Doubles>& matrices) {
    std::vector<const Doubles*> some;
    for (const Doubles& m : matrices) some.push_back(&m);
    return some;
  };
  multiply_tensor(result.layer.k, {&result.k[0].matrix, &result.k[1].matrix});
  multiply_tensor(*result.layer.v, {&result.v[0].matrix, &result.v[1].matrix});
  multiply_tensor(result.layer.q, all(dual_k));
  multiply_rows(result.layer.o_proj, 4, all(dual_v));
  return result;
}

/// Relative error of a plan on all rows of a side, with the codec and in double, in the metric of queries or of o_proj.
double error_of(const LayerStats& stats, const TensorPlan& plan, Side side) {
  double cost = 0.0, energy = 0.0;
  for (int head = 0; head < 2; ++head) {
    const std::vector<float> rows = (side == Side::k ? stats.sample.k : stats.sample.v).head(head);
    std::vector<float> seen = rows;
    reconstruct(plan, head, seen, kDim);
    const Doubles metric = side == Side::k ? mean_moment(stats.moment(Moment::query).at(static_cast<std::size_t>(head)))
                                           : Doubles(stats.o_proj_metric.begin() + head * kDim * kDim,
                                                     stats.o_proj_metric.begin() + (head + 1) * kDim * kDim);
    for (std::size_t t = 0; t < rows.size(); t += kSide)
      for (std::size_t i = 0; i < kSide; ++i)
        for (std::size_t j = 0; j < kSide; ++j) {
          const double x = rows[t + i], y = rows[t + j], m = metric[i * kSide + j];
          energy += x * m * y;
          cost += (x - double{seen[t + i]}) * m * (y - double{seen[t + j]});
        }
  }
  return cost / energy;
}

/// Relative root mean square difference of the rows that the two coders get: x A of one model, x M A' of the other.
double difference_of_codes(const LayerStats& a_stats, const TensorPlan& a_plan, const LayerStats& b_stats,
                           const TensorPlan& b_plan, Side side, int head) {
  const std::vector<float> a = (side == Side::k ? a_stats.sample.k : a_stats.sample.v).head(head);
  std::vector<float> b(a.size());
  // The order of the sample depends on the bytes of the rows, so equal tokens have other indices in it.
  const std::vector<float> stored = (side == Side::k ? b_stats.sample.k : b_stats.sample.v).head(head);
  for (std::size_t t = 0; t < a_stats.sample.token.size(); ++t) {
    const auto place = std::find(b_stats.sample.token.begin(), b_stats.sample.token.end(), a_stats.sample.token[t]) -
                       b_stats.sample.token.begin();
    std::copy_n(stored.begin() + place * kDim, kSide, b.begin() + static_cast<std::ptrdiff_t>(t * kSide));
  }
  std::vector<float> y(kSide), z(kSide);
  double apart = 0.0, size = 0.0;
  for (std::size_t t = 0; t < a.size(); t += kSide) {
    rotate_row(a_plan, head, std::span(a).subspan(t, kSide), y);
    rotate_row(b_plan, head, std::span<const float>(b).subspan(t, kSide), z);
    for (std::size_t j = 0; j < kSide; ++j) {
      size += double{y[j]} * double{y[j]};
      apart += (double{y[j]} - double{z[j]}) * (double{y[j]} - double{z[j]});
    }
  }
  return std::sqrt(apart / size);
}

struct Decided {
  LayerStats stats;
  LayerPlan plan;
};
Decided decide(const LayerActivations& layer, const Options& options) {
  Decided decided{test::stats_for(layer, options, kAllTokens), {}};
  decided.plan = find_method(options.method).decide(test::MemoryStats({decided.stats}), options, {}).plans.at(0);
  return decided;
}

struct Case {
  const char* name;
  Options options;
};

std::vector<Case> invariant_cases() {
  const auto both = [](Options& o, auto change) {
    change(o.k);
    change(o.v);
  };
  const auto balanced = [&](Options& o, CoderKind coder, ScaleRule rule) {
    both(o, [&](SideOptions& s) {
      s.transform = TransformKind::balanced;
      s.coder = coder;
      s.rule = rule;
      s.clip = 1.0;
      s.center = true;
      s.hadamard = true;
    });
    o.random_signs = o.method == "quarot";
  };
  const auto klt = [&](Options& o) {
    both(o, [&](SideOptions& s) {
      s.transform = TransformKind::klt;
      s.allocate = Allocate::channel;
      s.center = true;
      s.coder = CoderKind::trellis;
      s.rule = ScaleRule::norm;
    });
    o.choose_transform = false;
    o.min_bits = 0;
    o.mixing = Mixing::hadamard;
  };
  return {{"quarot, symmetric",
           test::options_of("quarot", [&](Options& o) { balanced(o, CoderKind::symmetric, ScaleRule::norm); })},
          {"quarot, trellis",
           test::options_of("quarot", [&](Options& o) { balanced(o, CoderKind::trellis, ScaleRule::norm); })},
          {"saw-int4, affine",
           test::options_of("saw-int4", [&](Options& o) { balanced(o, CoderKind::affine, ScaleRule::minmax); })},
          {"oscar, codebook",
           test::options_of("oscar", [&](Options& o) { balanced(o, CoderKind::codebook, ScaleRule::norm); })},
          {"oscar, clip searched",
           test::options_of(
               "oscar", [&](Options& o) { both(o, [](SideOptions& s) { s.transform = TransformKind::balanced; }); })},
          {"random, symmetric",
           test::options_of("random", [&](Options& o) { balanced(o, CoderKind::symmetric, ScaleRule::norm); })},
          {"block-gtq, klt", test::options_of("block-gtq", klt)},
          {"kvq, klt", test::options_of("kvq", klt)}};
}

}  // namespace

TEST_CASE("Decisions with a transform do not notice how a model is scaled", "[methods][property]") {
  for (const auto& [seed, condition] : {std::pair{std::uint64_t{1}, 10.0}, std::pair{std::uint64_t{2}, 1e4}}) {
    const LayerActivations layer = correlated_layer(seed);
    for (const Case& one : invariant_cases()) {
      INFO(one.name << ", seed " << seed << ", condition number " << condition);
      const Decided base = decide(layer, one.options);
      const Rescaled other =
          rescaled(layer, [&](std::uint64_t draw) { return any_map(condition, seed * 10000 + draw); });
      const Decided found = decide(other.layer, one.options);
      for (const Side side : kSides) {
        INFO("side " << name(side));
        const TensorPlan &expected = *base.plan.side(side), &plan = *found.plan.side(side);
        CHECK(plan.clip_ratio == expected.clip_ratio);
        REQUIRE(plan.allocation.has_value() == expected.allocation.has_value());
        if (plan.allocation) CHECK(plan.allocation->channel_bits == expected.allocation->channel_bits);
        for (std::size_t h = 0; h < 2; ++h) {
          CHECK(difference_of_codes(base.stats, expected, found.stats, plan, side, static_cast<int>(h)) < 0.01);
          CHECK(plan.transform->outlier_gain[h] > expected.transform->outlier_gain[h]);
          CHECK(plan.transform->condition[h] <= kMostCondition);
        }
        const double before = error_of(base.stats, expected, side), after = error_of(found.stats, plan, side);
        CHECK(after == Approx(before).epsilon(0.01));
        CHECK(plan.error->after == Approx(expected.error->after).epsilon(0.01));
      }
    }
  }
}

TEST_CASE("A diagonal transform does not notice how channels are scaled", "[methods][property]") {
  const LayerActivations layer = correlated_layer(3);
  const Options options = test::options_of("quarot", [](Options& o) {
    for (SideOptions* side : {&o.k, &o.v}) {
      side->transform = TransformKind::diagonal;
      side->coder = CoderKind::symmetric;
      side->rule = ScaleRule::norm;
      side->center = true;
    }
  });
  const Decided base = decide(layer, options);
  for (const double condition : {10.0, 1e4}) {
    INFO("condition number " << condition);
    const Rescaled other = rescaled(layer, [&](std::uint64_t draw) { return diagonal_map(condition, draw); });
    const Decided found = decide(other.layer, options);
    for (const Side side : kSides) {
      INFO("side " << name(side));
      const TensorPlan &expected = *base.plan.side(side), &plan = *found.plan.side(side);
      REQUIRE(plan.rotation.kind == RotationKind::block_hadamard);
      for (std::size_t i = 0; i < 2 * kSide; ++i) {
        const Map& map = (side == Side::k ? other.k : other.v)[i / kSide];
        CHECK(double{plan.rotation.channel_scale[i]} * map.matrix[i % kSide * (kSide + 1)] ==
              Approx(double{expected.rotation.channel_scale[i]}).epsilon(0x1p-7));
        if (side == Side::k)
          CHECK(plan.rotation.channel_scale[i] ==
                plan.rotation.channel_scale[i / kSide * kSide + (i + kSide / 2) % kSide]);  // of a rotary pair
      }
      CHECK(error_of(found.stats, plan, side) == Approx(error_of(base.stats, expected, side)).epsilon(0.01));
    }
  }
}

TEST_CASE("Orthogonal rotations do notice, by orders of magnitude", "[methods][property]") {
  const LayerActivations layer = correlated_layer(4);
  for (const char* method : {"quarot", "saw-int4", "oscar"}) {
    INFO(method);
    const Options options = test::options_of(method);
    const Decided base = decide(layer, options);
    double least = 1.0;  // error ratio at the previous condition number
    for (const double condition : {10.0, 100.0, 1e4}) {
      const Rescaled other = rescaled(layer, [&](std::uint64_t draw) { return any_map(condition, draw); });
      const Decided found = decide(other.layer, options);
      const double moved = error_of(found.stats, found.plan.k, Side::k) / error_of(base.stats, base.plan.k, Side::k);
      CAPTURE(condition, moved);
      CHECK(moved > 2.0 * least);
      least = moved;
    }
  }
}
