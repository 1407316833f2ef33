#include "support/transforms.h"

#include "support/random_data.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvq::test {

namespace {

using Vectors = std::vector<std::vector<double>>;
constexpr int kReflections = 16;

Vectors random_reflections(std::size_t dim, Random& random) {
  Vectors all(kReflections, std::vector<double>(dim));
  for (std::vector<double>& u : all) {
    double square = 0.0;
    for (double& x : u) x = random.normal(), square += x * x;
    for (double& x : u) x *= std::sqrt(2.0 / square);
  }
  return all;
}

/// Replaces m by H m, or if `right` by m H, where H = 1 - u u^T.
void reflect(std::vector<double>& m, const std::vector<double>& u, bool right) {
  const std::size_t d = u.size();
  std::vector<double> dots(d, 0.0);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j) dots[right ? i : j] += u[right ? j : i] * m[i * d + j];
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j) m[i * d + j] -= right ? dots[i] * u[j] : u[i] * dots[j];
}

std::vector<double> diagonal(const std::vector<double>& entries) {
  std::vector<double> m(entries.size() * entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) m[i * entries.size() + i] = entries[i];
  return m;
}

}  // namespace

Transform random_transform(int dim, double condition, std::uint64_t seed, int spread) {
  const auto d = static_cast<std::size_t>(dim);
  Random random(seed);
  const Vectors left = random_reflections(d, random), right = random_reflections(d, random);
  std::vector<double> exponents(d), u = diagonal(std::vector<double>(d, 1.0));
  for (double& x : exponents) x = random.uniform(-1.0, 1.0);
  for (const std::vector<double>& reflection : left) reflect(u, reflection, false);

  // The condition depends on the left factor and the stretches, and grows with the stretches.
  const auto condition_of = [&](double size) {
    double sum = 0.0;
    for (std::size_t i = 0; i < d; ++i) {
      double there = 0.0, back = 0.0;
      for (std::size_t k = 0; k < d; ++k) {
        const double square = u[i * d + k] * u[i * d + k], stretch = std::exp(2.0 * size * exponents[k]);
        there += square * stretch, back += square / stretch;
      }
      sum += there * back;
    }
    return std::sqrt(sum / static_cast<double>(d));
  };
  double low = 0.0, high = 10.0;
  for (int i = 0; i < 30; ++i) (condition_of((low + high) / 2) < condition ? low : high) = (low + high) / 2;
  std::vector<double> stretches(d), shrinks(d);
  for (std::size_t k = 0; k < d; ++k) stretches[k] = std::exp(low * exponents[k]), shrinks[k] = 1.0 / stretches[k];

  std::vector<double> a = diagonal(stretches), back = diagonal(shrinks);
  for (const std::vector<double>& reflection : left) reflect(a, reflection, false), reflect(back, reflection, true);
  for (const std::vector<double>& reflection : right) reflect(a, reflection, true), reflect(back, reflection, false);
  for (std::size_t i = 0; i < d; ++i) {
    const double scale = std::ldexp(1.0, random.integer(-spread, spread));
    for (std::size_t j = 0; j < d; ++j) a[i * d + j] *= scale, back[j * d + i] /= scale;
  }
  return {{a.begin(), a.end()}, {back.begin(), back.end()}};
}

Transform random_transforms(int count, int dim, double condition, std::uint64_t seed, int spread) {
  Transform all;
  for (int i = 0; i < count; ++i) {
    const Transform one = random_transform(dim, condition, seed + static_cast<std::uint64_t>(i), spread);
    all.matrix.insert(all.matrix.end(), one.matrix.begin(), one.matrix.end());
    all.inverse.insert(all.inverse.end(), one.inverse.begin(), one.inverse.end());
  }
  return all;
}

std::vector<float> random_scales(int count, int dim, int spread, std::uint64_t seed, bool pairs, int digits) {
  Random random(seed);
  const auto d = static_cast<std::size_t>(dim);
  std::vector<float> scales(static_cast<std::size_t>(count) * d);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const int exponent = random.integer(-spread, spread);
    // 2^spread is the largest scale, so it gets no further digits.
    const int more = exponent == spread ? 0 : random.integer(0, (1 << (digits - 1)) - 1);
    const float own = std::ldexp(1.0f + std::ldexp(static_cast<float>(more), 1 - digits), exponent);
    scales[i] = pairs && i % d >= d / 2 ? scales[i - d / 2] : own;
  }
  return scales;
}

}  // namespace kvq::test
