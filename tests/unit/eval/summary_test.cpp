#include <kvq/eval/summary.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

using namespace kvq;

namespace {

/// numpy's linear rule: the quantile is at index p (n - 1) of the sorted numbers.
double quantile(std::vector<double> sorted, double p) {
  std::sort(sorted.begin(), sorted.end());
  const double place = p * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place), above = std::min(below + 1, sorted.size() - 1);
  const double part = place - static_cast<double>(below);
  return (1.0 - part) * sorted[below] + part * sorted[above];
}

void check_distribution(const std::vector<float>& values) {
  const std::vector<double> exact(values.begin(), values.end());
  double sum = 0.0, size = 0.0;
  for (const double x : exact) sum += x, size = std::max(size, std::abs(x));
  const Distribution found = distribution_of(values);
  const double close = 1e-13 * size;
  CHECK(found.mean == Approx(sum / static_cast<double>(exact.size())).margin(10 * close).epsilon(0));
  CHECK(found.median == Approx(quantile(exact, 0.5)).margin(close).epsilon(0));
  CHECK(found.p95 == Approx(quantile(exact, 0.95)).margin(close).epsilon(0));
  CHECK(found.p99 == Approx(quantile(exact, 0.99)).margin(close).epsilon(0));
  CHECK(found.max == *std::max_element(exact.begin(), exact.end()));
}

/// Paired units: a in (1, 2), b = a (1 + change + noise).
struct Units {
  std::vector<double> a, b;
};
Units random_units(std::size_t count, double change, double noise, test::Random& random) {
  Units units;
  for (std::size_t i = 0; i < count; ++i) {
    units.a.push_back(random.uniform(1.0, 2.0));
    units.b.push_back(units.a.back() * (1.0 + change + noise * random.normal()));
  }
  return units;
}
PairedChange change_of(const Units& units, std::uint64_t seed = 0) { return paired_change(units.a, units.b, seed); }

/// Reference for the interval, from other random numbers and many more samples.
PairedChange reference_change(const Units& units, int samples, test::Random& random) {
  const int n = static_cast<int>(units.a.size());
  std::vector<double> changes;
  for (int sample = 0; sample < samples; ++sample) {
    double a = 0.0, b = 0.0;
    for (int i = 0; i < n; ++i) {
      const auto unit = static_cast<std::size_t>(random.integer(0, n - 1));
      a += units.a[unit], b += units.b[unit];
    }
    changes.push_back(b / a - 1.0);
  }
  return {.change = 0.0, .low = quantile(changes, 0.025), .high = quantile(changes, 0.975)};
}

double width(const PairedChange& change) { return change.high - change.low; }

/// Whether another point is at least as good in both coordinates and better in one.
bool is_dominated(const std::vector<FrontPoint>& points, std::size_t own) {
  return std::any_of(points.begin(), points.end(), [&](const FrontPoint& other) {
    return other.x <= points[own].x && other.y <= points[own].y && (other.x < points[own].x || other.y < points[own].y);
  });
}

std::vector<FrontPoint> random_points(std::size_t count, int grid, test::Random& random) {
  std::vector<FrontPoint> points;
  for (std::size_t i = 0; i < count; ++i) {
    if (grid > 0)
      points.push_back({static_cast<double>(random.integer(0, grid)), static_cast<double>(random.integer(0, grid))});
    else
      points.push_back({random.normal(), random.normal()});
  }
  return points;
}

}  // namespace

TEST_CASE("Quantiles are those of numpy's linear rule", "[eval][summary]") {
  test::Random random(1);
  for (const std::size_t count : {1u, 2u, 3u, 4u, 19u, 20u, 21u, 22u, 99u, 100u, 101u, 102u, 997u}) {
    CAPTURE(count);
    std::vector<float> values = test::gaussian(count, count);
    check_distribution(values);  // signs of both kinds
    for (float& x : values) x = -std::exp(3.0f * x);
    check_distribution(values);  // all below zero, far apart
    for (float& x : values) x = static_cast<float>(random.integer(0, 3));
    check_distribution(values);  // duplicates
  }
}

TEST_CASE("Hand-made quantiles", "[eval][summary]") {
  const Distribution none = distribution_of({});
  CHECK((none.mean == 0.0 && none.median == 0.0 && none.p95 == 0.0 && none.p99 == 0.0 && none.max == 0.0));
  const Distribution one = distribution_of({-2.5f});
  CHECK((one.mean == -2.5 && one.median == -2.5 && one.p95 == -2.5 && one.p99 == -2.5 && one.max == -2.5));
  const Distribution two = distribution_of({4.0f, 2.0f});
  CHECK((two.mean == 3.0 && two.median == 3.0 && two.max == 4.0));
  CHECK(two.p95 == Approx(3.9).epsilon(1e-14));
  CHECK(two.p99 == Approx(3.98).epsilon(1e-14));
  const Distribution same = distribution_of(std::vector<float>(1000, 0.1f));
  CHECK((same.median == double{0.1f} && same.p95 == double{0.1f} && same.p99 == double{0.1f} &&
         same.max == double{0.1f}));
  std::vector<float> hundred_and_one;
  for (int i = 100; i >= 0; --i) hundred_and_one.push_back(static_cast<float>(i * i));
  const Distribution squares = distribution_of(hundred_and_one);
  CHECK((squares.median == 2500.0 && squares.p95 == 9025.0 && squares.p99 == 9801.0 && squares.max == 10000.0));
}

TEST_CASE("One NaN leaves no quantile", "[eval][summary]") {
  std::vector<float> values(100, 0.25f);
  values[37] = std::numeric_limits<float>::quiet_NaN();
  const Distribution found = distribution_of(values);
  for (const double x : {found.mean, found.median, found.p95, found.p99, found.max}) CHECK(std::isnan(x));
}

TEST_CASE("The mean of many small numbers is summed in double", "[eval][summary]") {
  std::vector<float> values(2000000, 0.1f);
  values.front() = 1e6f;
  const double expected = (1e6 + 1999999.0 * double{0.1f}) / 2e6;
  CHECK(distribution_of(values).mean == Approx(expected).epsilon(1e-9));
}

TEST_CASE("Equal units have not changed", "[eval][summary]") {
  test::Random random(2);
  for (const std::size_t count : {2u, 7u, 64u}) {
    const Units units = random_units(count, 0.0, 0.0, random);
    const PairedChange found = paired_change(units.a, units.a, 3);
    CAPTURE(count);
    CHECK((found.change == 0.0 && found.low == 0.0 && found.high == 0.0));
  }
}

TEST_CASE("A constant ratio leaves no interval, however different the units are", "[eval][summary]") {
  for (const double ratio : {0.0, 0.25, 0.7, 1.3, 8.0}) {
    CAPTURE(ratio);
    Units units;
    for (const double x : test::gaussian_double(48, 5))
      units.a.push_back(std::exp(2.0 * x)), units.b.push_back(ratio * units.a.back());
    const PairedChange found = change_of(units);
    CHECK(found.change == Approx(ratio - 1.0).margin(1e-14));
    CHECK(found.low == Approx(ratio - 1.0).margin(1e-13));
    CHECK(found.high == Approx(ratio - 1.0).margin(1e-13));
  }
}

TEST_CASE("One unit has a change and no interval", "[eval][summary]") {
  const PairedChange found = change_of({.a = {4.0}, .b = {5.0}});
  CHECK((found.change == 0.25 && std::isnan(found.low) && std::isnan(found.high)));
}

TEST_CASE("The change is one of sums, not a mean of ratios", "[eval][summary]") {
  const PairedChange found = change_of({.a = {1.0, 9.0}, .b = {2.0, 9.0}});
  CHECK(found.change == Approx(0.1).epsilon(1e-14));
  CHECK(found.low == 0.0);  // a quarter of the samples are (9, 9) twice
  CHECK(found.high == 1.0);
}

TEST_CASE("The interval is that of a bootstrap of the pairs", "[eval][summary]") {
  test::Random random(7);
  for (const std::size_t count : {5u, 48u, 300u}) {
    CAPTURE(count);
    const Units units = random_units(count, -0.2, 0.3, random);
    const PairedChange found = change_of(units, 11), expected = reference_change(units, 40000, random);
    // With 2000 samples, an end of the interval is within about 3 of its standard errors, 0.07 of the interval.
    CHECK(std::abs(found.low - expected.low) < 0.07 * width(expected));
    CHECK(std::abs(found.high - expected.high) < 0.07 * width(expected));
    CHECK(found.low < found.change);
    CHECK(found.change < found.high);
  }
}

TEST_CASE("The interval shrinks as the root of the number of units", "[eval][summary]") {
  test::Random random(8);
  const PairedChange few = change_of(random_units(50, 0.1, 0.2, random)),
                     many = change_of(random_units(5000, 0.1, 0.2, random));
  const double expected = 2.0 * 1.96 * 0.2 * std::sqrt(7.0 / 3.0) / 1.5;  // sd(a noise) / mean a, a uniform in (1, 2)
  CHECK(width(few) * std::sqrt(50.0) == Approx(expected).epsilon(0.35));
  CHECK(width(many) * std::sqrt(5000.0) == Approx(expected).epsilon(0.1));
}

TEST_CASE("A seed moves the ends of the interval a little, and nothing else", "[eval][summary]") {
  test::Random random(9);
  const Units units = random_units(60, 0.05, 0.2, random);
  const PairedChange first = change_of(units, 0), again = change_of(units, 0);
  CHECK((first.change == again.change && first.low == again.low && first.high == again.high));
  std::set<double> lows;
  for (const std::uint64_t seed : {0ull, 1ull, 2ull, 1ull << 40, ~0ull}) {
    const PairedChange other = change_of(units, seed);
    CHECK(other.change == first.change);
    CHECK(std::abs(other.low - first.low) < 0.15 * width(first));
    CHECK(std::abs(other.high - first.high) < 0.15 * width(first));
    lows.insert(other.low);
  }
  CHECK(lows.size() == 5);
}

TEST_CASE("Without a sum of a there is no change", "[eval][summary]") {
  for (const Units& units : {Units{{0.0, 0.0}, {1.0, 2.0}}, Units{{0.0}, {0.0}}}) {
    const PairedChange found = change_of(units);
    CHECK(std::isnan(found.change));
    CHECK(std::isnan(found.low));
    CHECK(std::isnan(found.high));
  }
}

TEST_CASE("Where a sums to 0 without being 0 all is NaN, as the header says, also the interval", "[eval][summary]") {
  const PairedChange found = change_of({.a = {1.0, -1.0}, .b = {1.0, 1.0}});
  CHECK(std::isnan(found.change));
  CHECK(std::isnan(found.low));
  CHECK(std::isnan(found.high));
}

TEST_CASE("Samples without a sum of a do not spoil the interval", "[eval][summary]") {
  // One of 2 units has no error, as an exact layer has. One sample in four has only that unit; the error doubles in all
  // others.
  const PairedChange found = change_of({.a = {0.0, 3.0}, .b = {0.0, 6.0}});
  CHECK(found.change == 1.0);
  CHECK(found.low == 1.0);
  CHECK(found.high == 1.0);
}

TEST_CASE("About 95 of 100 intervals hold the truth", "[eval][summary]") {
  test::Random random(10);
  constexpr int kTrials = 400;
  int covered = 0, below = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const PairedChange found = change_of(random_units(40, 0.1, 0.25, random), static_cast<std::uint64_t>(trial));
    if (found.low <= 0.1 && 0.1 <= found.high) ++covered;
    if (found.high < 0.1) ++below;
  }
  // Percentile intervals of 40 units cover a little less, 94 of 100; 4 standard errors are 5 of 100.
  CHECK(covered > 0.89 * kTrials);
  CHECK(covered < 0.985 * kTrials);
  // Misses occur at both ends.
  const int above = kTrials - covered - below;
  CHECK(below > 0);
  CHECK(above > 0);
}

TEST_CASE("A ratio of nothing to nothing is nothing", "[eval][summary]") {
  CHECK(ratio_of(0.0, 0.0) == 0.0);
  CHECK(ratio_of(0.0, 2.0) == 0.0);
  CHECK(ratio_of(3.0, 2.0) == 1.5);
  CHECK(ratio_of(1e-300, 1e-300) == 1.0);
  CHECK(std::isinf(ratio_of(1.0, 0.0)));  // an error relative to zero must not become 0
}

TEST_CASE("The front of distinct points is what nothing else dominates", "[eval][summary]") {
  test::Random random(12);
  for (int trial = 0; trial < 400; ++trial) {
    CAPTURE(trial);
    // On a coarse grid many points share a coordinate.
    std::vector<FrontPoint> points =
        random_points(static_cast<std::size_t>(random.integer(0, 40)), trial % 2 == 0 ? 9 : 0, random);
    std::set<std::pair<double, double>> seen;
    std::erase_if(points, [&](const FrontPoint& point) { return !seen.insert({point.x, point.y}).second; });
    std::set<std::size_t> expected;
    for (std::size_t i = 0; i < points.size(); ++i)
      if (!is_dominated(points, i)) expected.insert(i);
    const std::vector<std::size_t> found = pareto_front(points);
    CHECK(std::set<std::size_t>(found.begin(), found.end()) == expected);
    CHECK(found.size() == expected.size());
    for (std::size_t i = 1; i < found.size(); ++i) {
      CHECK(points[found[i - 1]].x < points[found[i]].x);
      CHECK(points[found[i - 1]].y > points[found[i]].y);
    }
  }
}

TEST_CASE("Hand-made fronts", "[eval][summary]") {
  using Places = std::vector<std::size_t>;
  const auto front = [](const std::vector<FrontPoint>& points) { return pareto_front(points); };
  CHECK(front({}).empty());
  CHECK(front({{3.0, 4.0}}) == Places{0});
  CHECK(front({{2.0, 1.0}, {1.0, 2.0}}) == Places{1, 0});
  CHECK(front({{1.0, 1.0}, {2.0, 2.0}}) == Places{0});
  CHECK(front({{1.0, 2.0}, {1.0, 1.0}}) == Places{1});  // equal bits, less error
  CHECK(front({{2.0, 1.0}, {1.0, 1.0}}) == Places{1});  // fewer bits, equal error
  CHECK(front({{-1.0, 0.0}, {0.0, -1.0}, {-2.0, 5.0}, {0.5, -1.0}}) == Places{2, 0, 1});
}

TEST_CASE("Equal points do not beat each other: all of them are on the front", "[eval][summary]") {
  test::Random random(13);
  for (int trial = 0; trial < 200; ++trial) {
    CAPTURE(trial);
    const std::vector<FrontPoint> points = random_points(30, 5, random);
    const std::vector<std::size_t> found = pareto_front(points);
    std::vector<std::size_t> expected;
    for (std::size_t i = 0; i < points.size(); ++i)
      if (!is_dominated(points, i)) expected.push_back(i);
    std::vector<std::size_t> sorted = found;
    std::sort(sorted.begin(), sorted.end());
    CHECK(sorted == expected);
    if (sorted != expected) break;  // one counterexample is enough
  }
}
