#include <kvq/compute/weight_change.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

using namespace kvq;

namespace {

/// Logits whose softmax is `p`.
std::vector<float> logits_of(const std::vector<float>& p) {
  std::vector<float> logits;
  for (const float weight : p) logits.push_back(weight > 0.0f ? std::log(weight) : -200.0f);
  return logits;
}

double change(const std::vector<float>& p, std::vector<float>& delta) {
  const std::vector<float> logits = logits_of(p);
  return change_weights(p.data(), logits.data(), delta.data(), static_cast<std::int64_t>(p.size()));
}

struct Expected {
  double divergence = 0.0;
  std::vector<double> change;
};

/// Reference by softmax of both rows of logits, in long double, so that differences of nearly equal numbers keep enough
/// digits.
Expected expected(const std::vector<float>& p, const std::vector<float>& delta) {
  std::vector<long double> exact, changed;
  long double total = 0.0L, z = 0.0L, top = -HUGE_VALL;
  for (const float weight : p) total += static_cast<long double>(weight);
  for (std::size_t t = 0; t < p.size(); ++t) {
    exact.push_back(static_cast<long double>(p[t]) / total);
    changed.push_back(exact[t] > 0.0L ? std::log(exact[t]) + static_cast<long double>(delta[t]) : -HUGE_VALL);
    top = std::max(top, changed[t]);
  }
  for (const long double logit : changed) z += std::exp(logit - top);
  Expected result;
  for (std::size_t t = 0; t < p.size(); ++t) {
    const long double log_changed = changed[t] - top - std::log(z);
    if (exact[t] > 0.0L) result.divergence += static_cast<double>(exact[t] * (std::log(exact[t]) - log_changed));
    result.change.push_back(static_cast<double>(std::exp(log_changed) - exact[t]));
  }
  return result;
}

std::vector<float> weights(std::size_t count, double sharpness, std::uint64_t seed) {
  std::vector<float> p = test::gaussian(count, seed, sharpness);
  double total = 0.0;
  for (float& x : p) total += x = std::exp(x);
  for (float& x : p) x = static_cast<float>(x / total);
  return p;
}

}  // namespace

TEST_CASE("Weights change as two softmaxes differ, down to small changes", "[compute]") {
  for (const std::size_t count : {1u, 2u, 15u, 16u, 17u, 100u, 1024u, 1025u, 5000u})
    for (const double sharpness : {0.1, 3.0})
      for (const double size : {1e-4, 0.05, 1.0, 8.0}) {
        const std::vector<float> p = weights(count, sharpness, count);
        std::vector<float> delta = test::gaussian(count, count + 1, size);
        for (float& x : delta) x += static_cast<float>(3.0 * size);  // a constant, which softmax ignores
        const Expected want = expected(p, delta);
        std::vector<float> change = delta;
        const double found = ::change(p, change);
        INFO(count << " weights, sharpness " << sharpness << ", changes of " << size);
        CHECK(found == Approx(want.divergence).epsilon(2e-6).margin(1e-15));
        double largest = 0.0;
        for (const double x : want.change) largest = std::max(largest, std::abs(x));
        for (std::size_t t = 0; t < count; ++t)
          CHECK(change[t] == Approx(want.change[t]).epsilon(1e-5).margin(1e-6 * largest + 1e-30));
      }
}

TEST_CASE("Nothing changes without a change, or by the same one everywhere", "[compute]") {
  const std::vector<float> p = weights(333, 2.0, 1);
  for (const float value : {0.0f, 5.0f, -200.0f, 1e4f}) {
    std::vector<float> delta(p.size(), value);
    CHECK(change(p, delta) == Approx(0.0).margin(1e-12));
    for (const float x : delta) CHECK(x == Approx(0.0).margin(1e-7));  // beside weights of 0.1
  }
  CHECK(change_weights(nullptr, nullptr, nullptr, 0) == 0.0);
}

TEST_CASE("Huge changes are taken as they are", "[compute]") {
  const std::vector<float> p = weights(50, 1.0, 2);
  for (const float size : {59.0f, 61.0f, 500.0f, 1e8f}) {
    std::vector<float> delta(p.size(), 0.0f);
    delta[7] = size;
    delta[9] = -size;
    const Expected want = expected(p, delta);
    CHECK(change(p, delta) == Approx(want.divergence).epsilon(1e-6));
    for (std::size_t t = 0; t < p.size(); ++t) CHECK(delta[t] == Approx(want.change[t]).margin(1e-6));
  }
}

TEST_CASE("Weights of zero stay zero", "[compute]") {
  std::vector<float> p = weights(40, 1.0, 3);
  for (std::size_t t = 20; t < 40; ++t) p[t] = 0.0f;
  std::vector<float> delta = test::gaussian(40, 4);
  const Expected want = expected(p, delta);
  CHECK(change(p, delta) == Approx(want.divergence).epsilon(1e-6));
  for (std::size_t t = 20; t < 40; ++t) CHECK(delta[t] == 0.0f);
}

TEST_CASE("A weight too small for a float can still win", "[compute]") {
  const std::vector<float> p{1.0f, 0.0f}, logits{0.0f, -200.0f};
  std::vector<float> delta{0.0f, 300.0f};
  CHECK(change_weights(p.data(), logits.data(), delta.data(), 2) == Approx(100.0).epsilon(1e-9));
  CHECK(delta == std::vector<float>{-1.0f, 1.0f});
}

TEST_CASE("Sums of squares keep their digits where a float has no place for a square", "[compute]") {
  for (const float size : {1e-35f, 1e-22f, 1e-15f, 1.0f, 1e15f, 1e19f, 3e19f, 1e30f, 1e38f})
    for (const std::size_t count : {1u, 17u, 1024u, 3000u}) {
      CAPTURE(size, count);
      std::vector<float> row = test::gaussian(count, 23, 0.3);
      double expected = 0.0;
      for (float& x : row) x *= size, expected += double{x} * double{x};
      CHECK(sum_of_squares(row.data(), static_cast<std::int64_t>(count)) == Approx(expected).epsilon(1e-5));
      if (size >= 1.0f)
        CHECK(dot_product(row.data(), row.data(), static_cast<std::int64_t>(count)) == Approx(expected).epsilon(1e-5));
    }
  const std::vector<float> zeros(100, 0.0f);
  CHECK(sum_of_squares(zeros.data(), 100) == 0.0);
}

TEST_CASE("Sums of rows keep their digits", "[compute]") {
  for (const std::size_t count : {0u, 1u, 31u, 1024u, 9000u}) {
    const std::vector<float> a = test::gaussian(count, 5), b = test::gaussian(count, 6);
    double sum = 0.0, squares = 0.0, dot = 0.0, size = 0.0;
    for (std::size_t t = 0; t < count; ++t) {
      sum += double{a[t]};
      size += std::abs(double{a[t]});
      squares += double{a[t]} * double{a[t]};
      dot += double{a[t]} * double{b[t]};
    }
    const auto n = static_cast<std::int64_t>(count);
    CHECK(sum_of(a.data(), n) == Approx(sum).margin(1e-6 * size));
    CHECK(sum_of_squares(a.data(), n) == Approx(squares).epsilon(1e-6));
    CHECK(dot_product(a.data(), b.data(), n) == Approx(dot).margin(1e-6 * squares));
  }
}
