#include <kvq/runtime/kernels/common/softmax_state.h>

#include <catch2/catch.hpp>

#include <cmath>
#include <random>
#include <vector>

using namespace kvq;

namespace {

float two_to(float x) { return std::exp2(x); }

/// Scores with one value each, and their softmax: state and weighted value.
struct Partial {
  SoftmaxState state;
  float value = 0.0f;

  void merge(const Partial& other) {
    const SoftmaxState::Factors factors = state.merge(other.state, two_to);
    value = value * factors.own + other.value * factors.other;
  }
};

Partial of_token(float score, float value) { return {{score, 1.0f}, value}; }

}  // namespace

TEST_CASE("Partial results merge to the softmax of all tokens, in any grouping", "[runtime]") {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 20.0f);
  for (int round = 0; round < 50; ++round) {
    std::vector<Partial> parts(1 + random() % 5);
    double sum = 0.0, value = 0.0;
    for (int token = 0; token < 40; ++token) {
      const float score = normal(random), x = normal(random);
      parts[random() % parts.size()].merge(of_token(score, x));
      sum += std::exp2(static_cast<double>(score)), value += std::exp2(static_cast<double>(score)) * x;
    }
    Partial all;
    for (const Partial& part : parts) all.merge(part);
    CHECK(all.state.max + std::log2(all.state.sum) == Approx(std::log2(sum)).epsilon(1e-5));
    CHECK(all.value / all.state.sum == Approx(value / sum).epsilon(1e-4).margin(1e-4));
  }
}

TEST_CASE("A partial result without tokens changes nothing, not even another one without tokens", "[runtime]") {
  Partial empty, some = of_token(3.0f, 5.0f);
  some.merge({});
  CHECK(some.state.max == 3.0f);
  CHECK(some.state.sum == 1.0f);
  CHECK(some.value == 5.0f);
  empty.merge({});
  CHECK(empty.state.empty());
  CHECK(empty.state.sum == 0.0f);
  CHECK(empty.value == 0.0f);
  empty.merge(some);
  CHECK(empty.state.max == 3.0f);
  CHECK(empty.value == 5.0f);
}

TEST_CASE("Below a raised reference partial results are added one after the other", "[runtime]") {
  const SoftmaxState a{1.0f, 2.0f}, b{4.0f, 0.5f};
  SoftmaxState sum;
  sum.raise(a.max), sum.raise(b.max);
  CHECK(sum.add(a, two_to) == 0.125f);
  CHECK(sum.add(b, two_to) == 1.0f);
  CHECK(sum.add({}, two_to) == 0.0f);
  CHECK(sum.max == 4.0f);
  CHECK(sum.sum == 0.75f);
}
