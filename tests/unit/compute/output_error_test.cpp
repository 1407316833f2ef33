#include <kvq/compute/output_error.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <numeric>

using namespace kvq;

namespace {

struct Sizes {
  int tokens = 24, dim = 6, v_dim = 5, queries = 2;
  int window = 0, sink = 0, recent = 0;
  bool curvature = false;
  double cap = 0.0;
  std::vector<double> sinks = {};
  std::vector<std::int64_t> query = {};  ///< empty: all
};

AttentionCase random_case(const Sizes& sizes, std::uint64_t seed) {
  AttentionCase data{
      .dim = sizes.dim,
      .v_dim = sizes.v_dim,
      .queries_per_head = sizes.queries,
      .scale = 0.4,
      .window = sizes.window,
      .cap = sizes.cap,
      .sinks = sizes.sinks,
      .sink_tokens = sizes.sink,
      .recent_tokens = sizes.recent,
      .query = sizes.query,
      .q = {},
      .k = {},
      .v = {},
      .curvature = {},
      .output_metric = {},
  };
  if (data.query.empty()) {
    data.query.resize(static_cast<std::size_t>(sizes.tokens));
    std::iota(data.query.begin(), data.query.end(), 0);
  }
  const auto tokens = static_cast<std::size_t>(sizes.tokens), dim = static_cast<std::size_t>(sizes.dim),
             v_dim = static_cast<std::size_t>(sizes.v_dim);
  data.q = test::gaussian(static_cast<std::size_t>(sizes.queries) * data.query.size() * dim, seed, 1.2);
  data.k = test::gaussian(tokens * dim, seed + 1, 1.2);
  data.v = test::gaussian(tokens * v_dim, seed + 2);
  if (!sizes.curvature) return data;
  for (int head = 0; head < sizes.queries; ++head) {  // symmetric, positive
    const std::vector<float> root = test::gaussian(v_dim * v_dim, seed + 10 + static_cast<std::uint64_t>(head));
    for (std::size_t i = 0; i < v_dim; ++i)
      for (std::size_t j = 0; j < v_dim; ++j) {
        float sum = 0.0f;
        for (std::size_t c = 0; c < v_dim; ++c) sum += root[i * v_dim + c] * root[j * v_dim + c];
        data.curvature.push_back(sum);
      }
  }
  return data;
}

/// Outputs of all heads and queries by the header's definition, in double, with keys `k` and values `v` for tokens that
/// are not exact.
std::vector<double> naive_outputs(const AttentionCase& data, const std::vector<float>& k, const std::vector<float>& v) {
  const auto dim = static_cast<std::size_t>(data.dim), v_dim = static_cast<std::size_t>(data.v_dim),
             m = data.query.size();
  std::vector<double> outputs;
  for (std::size_t head = 0; head < static_cast<std::size_t>(data.queries_per_head); ++head)
    for (std::size_t i = 0; i < m; ++i) {
      const std::int64_t at = data.query[i];
      std::vector<double> weights, out(v_dim, 0.0);
      double sum = data.sinks.empty() ? 0.0 : std::exp(data.sinks[head]);
      for (std::int64_t t = 0; t <= at; ++t) {
        const bool seen = data.window == 0 || at - t < data.window,
                   exact = t < data.sink_tokens || at - t < data.recent_tokens;
        const std::vector<float>& keys = exact ? data.k : k;
        double logit = 0.0;
        for (std::size_t c = 0; c < dim; ++c)
          logit += static_cast<double>(data.q[(head * m + i) * dim + c]) *
                   static_cast<double>(keys[static_cast<std::size_t>(t) * dim + c]);
        logit *= data.scale;
        if (data.cap > 0.0) logit = data.cap * std::tanh(logit / data.cap);
        weights.push_back(seen ? std::exp(logit) : 0.0);
        sum += weights.back();
      }
      for (std::int64_t t = 0; t <= at; ++t) {
        const bool exact = t < data.sink_tokens || at - t < data.recent_tokens;
        const std::vector<float>& values = exact ? data.v : v;
        for (std::size_t c = 0; c < v_dim; ++c)
          out[c] += weights[static_cast<std::size_t>(t)] / sum *
                    static_cast<double>(values[static_cast<std::size_t>(t) * v_dim + c]);
      }
      outputs.insert(outputs.end(), out.begin(), out.end());
    }
  return outputs;
}

OutputChange naive_change(const AttentionCase& data, const std::vector<double>& e) {
  const auto v_dim = static_cast<std::size_t>(data.v_dim), m = data.query.size();
  OutputChange change;
  for (std::size_t row = 0; row < e.size() / v_dim; ++row)
    for (std::size_t i = 0; i < v_dim; ++i) {
      const double square = e[row * v_dim + i] * e[row * v_dim + i];
      change.squared += square;
      if (data.curvature.empty())
        change.curved += square;
      else
        for (std::size_t j = 0; j < v_dim; ++j)
          change.curved += e[row * v_dim + i] * static_cast<double>(data.curvature[(row / m * v_dim + i) * v_dim + j]) *
                           e[row * v_dim + j];
    }
  change.curved /= 2.0 * static_cast<double>(m);
  change.squared /= 2.0 * static_cast<double>(m);
  return change;
}

std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

std::vector<float> disturbed(const std::vector<float>& x, double size, std::uint64_t seed) {
  std::vector<float> result = x;
  const std::vector<float> noise = test::gaussian(x.size(), seed, size);
  for (std::size_t i = 0; i < x.size(); ++i) result[i] += noise[i];
  return result;
}

void check_close(const OutputChange& found, const OutputChange& expected) {
  CHECK(found.curved == Approx(expected.curved).epsilon(2e-4));
  CHECK(found.squared == Approx(expected.squared).epsilon(2e-4));
}

const Sizes kCases[] = {
    {},
    {.queries = 1},
    {.queries = 4, .curvature = true},
    {.cap = 0.8},
    {.recent = 4, .cap = 5.0},
    {.sinks = {0.5, -1.0}},
    {.window = 5, .cap = 1.5, .sinks = {2.0, 0.0}},
    {.window = 5},
    {.window = 1},
    {.window = 100, .curvature = true},
    {.sink = 3},
    {.recent = 4},
    {.sink = 2, .recent = 3, .curvature = true},
    {.window = 7, .sink = 2, .recent = 3},
    {.tokens = 70, .dim = 16, .v_dim = 3, .queries = 3, .query = {0, 1, 5, 33, 34, 69}},
    {
        .tokens = 300,
        .dim = 8,
        .v_dim = 8,
        .window = 90,
        .sink = 4,
        .recent = 16,
        .curvature = true,
        .query = {2, 3, 4, 15, 16, 17, 18, 150, 299},
    },
    {.tokens = 1, .dim = 1, .v_dim = 1, .queries = 1},
};

}  // namespace

TEST_CASE("Errors of keys and values are those of attention done naively in double", "[solve][output]") {
  std::uint64_t seed = 10;
  for (const Sizes& sizes : kCases) {
    seed += 100;
    const AttentionCase data = random_case(sizes, seed);
    INFO("window " << sizes.window << ", sink " << sizes.sink << ", recent " << sizes.recent << ", tokens "
                   << sizes.tokens << ", curvature " << sizes.curvature);
    const OutputError error(data);
    const std::vector<double> exact = naive_outputs(data, data.k, data.v);
    check_close(error.energy(), naive_change(data, exact));
    for (const double size : {0.05, 0.5}) {
      const std::vector<float> k = disturbed(data.k, size, seed + 50), v = disturbed(data.v, size, seed + 51);
      check_close(error.of_keys(k), naive_change(data, minus(naive_outputs(data, k, data.v), exact)));
      check_close(error.of_values(v), naive_change(data, minus(naive_outputs(data, data.k, v), exact)));
    }
  }
}

TEST_CASE("Exact rows cause no error, and without curvature both measures agree", "[solve][output]") {
  for (const Sizes& sizes : kCases) {
    const AttentionCase data = random_case(sizes, 7);
    const OutputError error(data);
    for (const OutputChange& change : {error.of_keys(data.k), error.of_values(data.v)}) {
      CHECK(change.curved == 0.0);
      CHECK(change.squared == 0.0);
    }
    if (sizes.curvature) continue;
    const std::vector<float> v = disturbed(data.v, 0.3, 9);
    CHECK(error.of_values(v).curved == error.of_values(v).squared);
    CHECK(error.energy().curved == error.energy().squared);
  }
}

TEST_CASE("Tokens that every query sees exactly, or that no query sees, may be anything", "[solve][output]") {
  const AttentionCase data = random_case({.tokens = 20, .sink = 4, .query = {6, 9, 15}}, 21);
  const OutputError error(data);
  std::vector<float> k = data.k, v = data.v;
  for (std::size_t t = 0; t < 20; ++t)
    if (t < 4 || t > 15) {
      for (int c = 0; c < data.dim; ++c) k[t * static_cast<std::size_t>(data.dim) + static_cast<std::size_t>(c)] = 3.0f;
      for (int c = 0; c < data.v_dim; ++c)
        v[t * static_cast<std::size_t>(data.v_dim) + static_cast<std::size_t>(c)] = -5.0f;
    }
  CHECK(error.of_keys(k).squared == 0.0);
  CHECK(error.of_values(v).squared == 0.0);
  k[5 * static_cast<std::size_t>(data.dim)] += 1.0f;
  v[15 * static_cast<std::size_t>(data.v_dim)] += 1.0f;
  CHECK(error.of_keys(k).squared > 0.0);
  CHECK(error.of_values(v).squared > 0.0);
}

TEST_CASE("Windows that cover everything leave no error", "[solve][output]") {
  const AttentionCase data = random_case({.tokens = 12, .sink = 5, .recent = 7}, 22);
  const OutputError error(data);
  CHECK(error.of_keys(disturbed(data.k, 1.0, 5)).squared == 0.0);
  CHECK(error.of_values(disturbed(data.v, 1.0, 5)).squared == 0.0);
}

TEST_CASE("Changes add up", "[solve][output]") {
  OutputChange sum{.curved = 1.0, .squared = 2.0};
  sum += {.curved = 0.5, .squared = 0.25};
  CHECK(sum.curved == 1.5);
  CHECK(sum.squared == 2.25);
}

TEST_CASE("Logits far beyond exp's range do not matter", "[solve][output]") {
  AttentionCase data = random_case({.tokens = 10}, 23);
  for (float& q : data.q) q *= 300.0f;
  const OutputError error(data);
  CHECK(std::isfinite(error.energy().squared));
  CHECK(std::isfinite(error.of_keys(disturbed(data.k, 0.1, 3)).squared));
}
