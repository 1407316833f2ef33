#include "support/matrix.h"

#include "support/random_data.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace kvq::test {

namespace {

std::size_t square(int n) { return static_cast<std::size_t>(n) * static_cast<std::size_t>(n); }
std::size_t at(int row, int column, int n) {
  return static_cast<std::size_t>(row) * static_cast<std::size_t>(n) + static_cast<std::size_t>(column);
}

double off_diagonal(std::span<const double> a, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j)
      if (i != j) sum += a[at(i, j, n)] * a[at(i, j, n)];
  return std::sqrt(sum);
}

/// One rotation of the plane (p, q) that makes a[p, q] zero.
void rotate_plane(std::vector<double>& a, std::vector<double>& vectors, int p, int q, int n) {
  const double apq = a[at(p, q, n)];
  if (apq == 0.0) return;
  const double theta = (a[at(q, q, n)] - a[at(p, p, n)]) / (2.0 * apq);
  const double t = (theta >= 0 ? 1.0 : -1.0) / (std::abs(theta) + std::hypot(theta, 1.0));
  const double c = 1.0 / std::hypot(t, 1.0), s = t * c;
  const auto turn = [&](double& x, double& y) {
    const double old = x;
    x = c * old - s * y;
    y = s * old + c * y;
  };
  for (int k = 0; k < n; ++k) turn(a[at(k, p, n)], a[at(k, q, n)]);
  for (int k = 0; k < n; ++k) turn(a[at(p, k, n)], a[at(q, k, n)]);
  for (int k = 0; k < n; ++k) turn(vectors[at(k, p, n)], vectors[at(k, q, n)]);
}

}  // namespace

std::vector<double> identity(int n) {
  std::vector<double> a(square(n), 0.0);
  for (int i = 0; i < n; ++i) a[at(i, i, n)] = 1.0;
  return a;
}

std::vector<double> multiply(std::span<const double> a, std::span<const double> b, int n) {
  std::vector<double> product(square(n), 0.0);
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < n; ++k)
      for (int j = 0; j < n; ++j) product[at(i, j, n)] += a[at(i, k, n)] * b[at(k, j, n)];
  return product;
}

std::vector<double> transpose(std::span<const double> a, int n) {
  std::vector<double> result(square(n));
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) result[at(j, i, n)] = a[at(i, j, n)];
  return result;
}

std::vector<double> conjugate(std::span<const double> c, std::span<const double> r, int n) {
  return multiply(transpose(r, n), multiply(c, r, n), n);
}

double trace(std::span<const double> a, int n) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += a[at(i, i, n)];
  return sum;
}

double orthogonality_defect(std::span<const double> a, int n) {
  const std::vector<double> product = multiply(transpose(a, n), a, n);
  double largest = 0.0;
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) largest = std::max(largest, std::abs(product[at(i, j, n)] - (i == j ? 1.0 : 0.0)));
  return largest;
}

std::vector<double> random_orthogonal(int n, std::uint64_t seed) {
  std::vector<double> a = gaussian_double(square(n), seed);
  for (int row = 0; row < n; ++row) {
    for (int pass = 0; pass < 2; ++pass)  // two passes give full precision
      for (int other = 0; other < row; ++other) {
        double dot = 0.0;
        for (int k = 0; k < n; ++k) dot += a[at(row, k, n)] * a[at(other, k, n)];
        for (int k = 0; k < n; ++k) a[at(row, k, n)] -= dot * a[at(other, k, n)];
      }
    double length = 0.0;
    for (int k = 0; k < n; ++k) length += a[at(row, k, n)] * a[at(row, k, n)];
    for (int k = 0; k < n; ++k) a[at(row, k, n)] /= std::sqrt(length);
  }
  return a;
}

std::vector<double> random_covariance(int n, std::uint64_t seed, double decay) {
  const std::vector<double> basis = random_orthogonal(n, seed);
  std::vector<double> c(square(n), 0.0);
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) c[at(i, j, n)] += std::pow(decay, k) * basis[at(k, i, n)] * basis[at(k, j, n)];
  return c;
}

EigenPairs jacobi(std::vector<double> a, int n) {
  std::vector<double> vectors = identity(n);
  const double size = std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0));
  for (int sweep = 0; sweep < 60 && off_diagonal(a, n) > 1e-15 * size; ++sweep)
    for (int p = 0; p < n; ++p)
      for (int q = p + 1; q < n; ++q) rotate_plane(a, vectors, p, q, n);

  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int x, int y) { return a[at(x, x, n)] > a[at(y, y, n)]; });
  EigenPairs result{std::vector<double>(static_cast<std::size_t>(n)), std::vector<double>(square(n))};
  for (int j = 0; j < n; ++j) {
    const int from = order[static_cast<std::size_t>(j)];
    result.values[static_cast<std::size_t>(j)] = a[at(from, from, n)];
    for (int i = 0; i < n; ++i) result.vectors[at(i, j, n)] = vectors[at(i, from, n)];
  }
  return result;
}

std::vector<double> sylvester_blocks(int n, int order) {
  std::vector<double> h(square(n), 0.0);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      if (i / order != j / order) continue;
      const auto common = static_cast<unsigned>(i % order) & static_cast<unsigned>(j % order);
      h[at(i, j, n)] = (std::popcount(common) % 2 == 0 ? 1.0 : -1.0) / std::sqrt(order);
    }
  return h;
}

}  // namespace kvq::test
