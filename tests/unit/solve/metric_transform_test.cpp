#include <kvq/core/dtype.h>
#include <kvq/solve/metric_transform.h>

#include "support/error_of.h"
#include "support/matrix.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace kvq;
using Doubles = std::vector<double>;

namespace {

constexpr double kNoBound = 1e300;
constexpr std::int64_t kManyTokens = 1 << 20;

Doubles diagonal(const Doubles& values) {
  const std::size_t n = values.size();
  Doubles matrix(n * n, 0.0);
  for (std::size_t i = 0; i < n; ++i) matrix[i * (n + 1)] = values[i];
  return matrix;
}

/// a m a^T, where `a` has any shape that fits.
Doubles congruent(const Doubles& a, const Doubles& m, int n) {
  return test::multiply(test::multiply(a, m, n), test::transpose(a, n), n);
}

double largest_difference(const Doubles& a, const Doubles& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

/// tr(A^-1 W A^-T) tr(A^T C A)
double product_of_traces(const HeadTransform& t, const Doubles& c, const Doubles& w, int n) {
  return test::trace(congruent(t.inverse, w, n), n) * test::trace(test::conjugate(c, t.matrix, n), n);
}

void check_inverse(const HeadTransform& t, int n) {
  CHECK(largest_difference(test::multiply(t.inverse, t.matrix, n), test::identity(n)) < 1e-8);
  CHECK(std::all_of(t.matrix.begin(), t.matrix.end(), [](double x) { return std::isfinite(x); }));
}

}  // namespace

TEST_CASE("A balanced transform makes covariance and metric the same diagonal matrix, descending, of mean square 1",
          "[solve]") {
  for (const int n : {1, 2, 7, 24}) {
    INFO(n << " channels");
    const Doubles c = test::random_covariance(n, 11, 0.8), w = test::random_covariance(n, 12, 0.7);
    const HeadTransform t = balanced_transform(c, w, {}, n, kManyTokens, kNoBound);
    check_inverse(t, n);
    const Doubles covariance = test::conjugate(c, t.matrix, n), metric = congruent(t.inverse, w, n);
    CHECK(test::trace(covariance, n) == Approx(n));
    Doubles expected(covariance.size(), 0.0);
    const double unit = test::trace(metric, n) / test::trace(covariance, n);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const std::size_t place = i * static_cast<std::size_t>(n + 1);
      expected[place] = covariance[place];
      if (i > 0) CHECK(covariance[place] <= covariance[place - static_cast<std::size_t>(n + 1)] * (1.0 + 1e-9));
      CHECK(metric[place] == Approx(unit * covariance[place]));
    }
    CHECK(largest_difference(covariance, expected) < 1e-8);
  }
}

TEST_CASE(
    "No other map has a smaller product of traces than a balanced one, and the outlier gain is how much larger the "
    "identity's is",
    "[solve]") {
  const int n = 12;
  const Doubles c = test::random_covariance(n, 21, 0.6), w = test::random_covariance(n, 22, 0.8);
  const HeadTransform best = balanced_transform(c, w, {}, n, kManyTokens, kNoBound);
  const double least = product_of_traces(best, c, w, n);
  CHECK(best.outlier_gain == Approx(test::trace(c, n) * test::trace(w, n) / least));
  CHECK(outlier_gain(c, w, n, kManyTokens) == Approx(best.outlier_gain));
  const HeadTransform diagonal_one = diagonal_transform(c, w, n, kManyTokens, {});
  CHECK(product_of_traces(diagonal_one, c, w, n) > least);
  CHECK(product_of_traces(diagonal_one, c, w, n) < test::trace(c, n) * test::trace(w, n));
  for (std::uint64_t seed = 0; seed < 20; ++seed) {  // neighbors of the optimum: A (1 + a small random matrix)
    HeadTransform other = best;
    Doubles step = test::random_covariance(n, 100 + seed, 0.9);
    for (double& x : step) x *= 0.05;
    Doubles near = test::identity(n), back = test::identity(n);
    for (std::size_t i = 0; i < near.size(); ++i) near[i] += step[i];
    const EigenPairs pairs = test::jacobi(near, n);
    Doubles reciprocal;
    for (const double value : pairs.values) reciprocal.push_back(1.0 / value);
    back = congruent(pairs.vectors, diagonal(reciprocal), n);
    other.matrix = test::multiply(best.matrix, near, n);
    other.inverse = test::multiply(back, best.inverse, n);
    CHECK(product_of_traces(other, c, w, n) > least * (1.0 + 1e-6));
  }
}

TEST_CASE("By hand: two channels, one of large keys and small queries", "[solve]") {
  const Doubles c = diagonal({16.0, 1.0}), w = diagonal({1.0 / 16.0, 1.0});
  const HeadTransform t = diagonal_transform(c, w, 2, kManyTokens, {});
  CHECK(t.scale == Doubles{0.25, 1.0});
  CHECK(t.outlier_gain == Approx(17.0 * (17.0 / 16.0) / 4.0));
  const HeadTransform shared =
      diagonal_transform(c, w, 2, kManyTokens, {{0, 1}});  // c = 17, w = 17/16 in both channels, so they are balanced
  CHECK(shared.scale[0] == shared.scale[1]);
}

TEST_CASE("Scales of channels are bfloat16 numbers", "[solve]") {
  const Doubles c = test::random_covariance(40, 5, 0.8), w = test::random_covariance(40, 6, 0.8);
  for (const double scale : diagonal_transform(c, w, 40, kManyTokens, {}).scale)
    CHECK(static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(scale)))) == scale);
}

TEST_CASE("Signs follow the mean, so that rows do not depend on the coordinates they were given in", "[solve]") {
  const int n = 8;
  const Doubles c = test::random_covariance(n, 31, 0.7), w = test::random_covariance(n, 32, 0.7);
  Doubles mean;
  for (int i = 0; i < n; ++i) mean.push_back(std::sin(1.0 + i));
  const HeadTransform t = balanced_transform(c, w, mean, n, kManyTokens, kNoBound);
  for (std::size_t j = 0; j < static_cast<std::size_t>(n); ++j) {
    double along = 0.0;
    for (std::size_t i = 0; i < mean.size(); ++i) along += mean[i] * t.matrix[i * static_cast<std::size_t>(n) + j];
    CHECK(along >= 0.0);
  }
}

TEST_CASE("Channels without variance, without metric, or with neither do no harm", "[solve]") {
  const int n = 6;
  for (const auto& [name, c, w] :
       {std::tuple{"constant channel", diagonal({4, 0, 1, 1, 2, 3}), diagonal({1, 5, 1, 2, 1, 1})},
        {"channel that no query looks at", diagonal({4, 2, 1, 1, 2, 3}), diagonal({1, 0, 1, 2, 1, 1})},
        {"both", diagonal({4, 0, 1, 1, 2, 3}), diagonal({1, 0, 1, 2, 1, 1})}}) {
    INFO(name);
    const HeadTransform t = balanced_transform(c, w, {}, n, kManyTokens, 4096.0);
    check_inverse(t, n);
    CHECK(std::isfinite(t.outlier_gain));
    const HeadTransform d = diagonal_transform(c, w, n, kManyTokens, {});
    check_inverse(d, n);
  }
  for (const auto& [c, w] : {std::pair{Doubles(36, 0.0), test::identity(n)}, {test::identity(n), Doubles(36, 0.0)}}) {
    const HeadTransform t = balanced_transform(c, w, {}, n, kManyTokens, 4096.0);
    CHECK(t.matrix == test::identity(n));
    CHECK(t.outlier_gain == 1.0);
  }
}

TEST_CASE("A covariance of fewer tokens than channels is drawn towards its diagonal", "[solve]") {
  const int n = 16;
  Doubles c(256, 0.0);  // rank 3 of 16
  for (std::size_t r = 0; r < 3; ++r)
    for (std::size_t i = 0; i < 16; ++i)
      for (std::size_t j = 0; j < 16; ++j)
        c[i * 16 + j] +=
            std::cos(static_cast<double>((i + 1) * (r + 1))) * std::cos(static_cast<double>((j + 1) * (r + 1)));
  const Doubles w = test::identity(n);
  const auto spread =
      [&](std::int64_t tokens) {  // how much more a direction without variance is amplified than the others
        const HeadTransform t = balanced_transform(c, w, {}, n, tokens, kNoBound);
        check_inverse(t, n);
        return *std::max_element(t.matrix.begin(), t.matrix.end());
      };
  CHECK(spread(3) < 3.0);
  CHECK(spread(3) < spread(100));
  CHECK(spread(static_cast<std::int64_t>(kTokensPerChannel) * n) > 100.0);  // from here on the covariance is believed
}

TEST_CASE("The condition number stays below its bound", "[solve]") {
  const int n = 10;
  const Doubles c = test::random_covariance(n, 41, 1e-3), w = test::random_covariance(n, 42, 1e-3);
  const auto condition = [&](const HeadTransform& t) {
    double total = 0.0;
    for (std::size_t i = 0; i < 10; ++i) {
      double row = 0.0, column = 0.0;
      for (std::size_t j = 0; j < 10; ++j) {
        row += t.matrix[i * 10 + j] * t.matrix[i * 10 + j];
        column += t.inverse[j * 10 + i] * t.inverse[j * 10 + i];
      }
      total += row * column;
    }
    return std::sqrt(total / n);
  };
  const double free = condition(balanced_transform(c, w, {}, n, kManyTokens, kNoBound));
  REQUIRE(free > 20.0);
  CHECK(condition(balanced_transform(c, w, {}, n, kManyTokens, 20.0)) <= 20.0);
}

TEST_CASE("NaN in a covariance or a metric is an error", "[solve]") {
  Doubles bad = test::identity(3);
  bad[4] = std::numeric_limits<double>::quiet_NaN();
  CHECK(test::error_text([&] { balanced_transform(bad, test::identity(3), {}, 3, 100, kNoBound); }) ==
        "numerical: transform: covariance or metric holds NaN or Inf");
  CHECK(test::error_text([&] { diagonal_transform(test::identity(3), bad, 3, 100, {}); }) ==
        "numerical: transform: covariance or metric holds NaN or Inf");
}
