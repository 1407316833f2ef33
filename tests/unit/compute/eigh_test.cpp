#include <kvq/compute/eigh.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

using namespace kvq;
using Catch::Matchers::StartsWith;

namespace {

std::vector<double> column(const EigenPairs& pairs, int j, int dim) {
  std::vector<double> vector;
  for (int i = 0; i < dim; ++i) vector.push_back(pairs.vectors[static_cast<std::size_t>(i * dim + j)]);
  return vector;
}

/// Checks the header's promises: orthogonal vectors, A v = lambda v, descending values, canonical signs.
void check(const std::vector<double>& a, int dim) {
  const EigenPairs pairs = eigh(a, dim);
  REQUIRE(pairs.values.size() == static_cast<std::size_t>(dim));
  const double size = std::sqrt(static_cast<double>(dim)) *
                      std::max(1e-300, test::largest_difference(a, std::vector<double>(a.size(), 0.0)));
  CHECK(test::orthogonality_defect(pairs.vectors, dim) < 1e-12);
  CHECK(std::is_sorted(pairs.values.rbegin(), pairs.values.rend()));

  const std::vector<double> av = test::multiply(a, pairs.vectors, dim);
  for (int j = 0; j < dim; ++j) {
    std::vector<double> expected = column(pairs, j, dim);
    for (double& x : expected) x *= pairs.values[static_cast<std::size_t>(j)];
    std::vector<double> found;
    for (int i = 0; i < dim; ++i) found.push_back(av[static_cast<std::size_t>(i * dim + j)]);
    if (test::largest_difference(found, expected) > 1e-12 * size) FAIL("residual of pair " << j);
    const std::vector<double> vector = column(pairs, j, dim);
    const auto peak =
        std::max_element(vector.begin(), vector.end(), [](double x, double y) { return std::abs(x) < std::abs(y); });
    if (*peak <= 0.0) FAIL("the largest component of vector " << j << " is " << *peak);
  }
}

}  // namespace

TEST_CASE("Eigenvectors are orthogonal, solve the equation, stand in order and have canonical signs", "[compute]") {
  for (const int dim : {1, 2, 3, 17, 64, 80, 128}) {
    INFO("dim " << dim);
    for (const double decay : {0.99, 0.8, 0.3})
      check(test::random_covariance(dim, static_cast<std::uint64_t>(dim), decay), dim);
  }
}

TEST_CASE("Matrices with negative eigenvalues are solved too", "[compute]") {
  for (const int dim : {2, 31, 64}) {
    std::vector<double> a = test::gaussian_double(static_cast<std::size_t>(dim * dim), 3);
    const std::vector<double> other = test::transpose(a, dim);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += other[i];
    check(a, dim);
    CHECK(eigh(a, dim).values.back() < 0.0);
  }
}

TEST_CASE("Repeated eigenvalues still give an orthogonal basis", "[compute]") {
  check(test::identity(16), 16);
  check(std::vector<double>(64, 0.0), 8);
  check(std::vector<double>(64, 1.0), 8);  // one eigenvalue 8, seven of 0
  const std::vector<double> r = test::random_orthogonal(24, 1);
  std::vector<double> spectrum = test::identity(24);
  for (int i = 0; i < 24; ++i) spectrum[static_cast<std::size_t>(i * 25)] = i / 8 + 1.0;
  std::vector<double> a = test::conjugate(spectrum, r, 24);
  for (int i = 0; i < 24; ++i)
    for (int j = 0; j < i; ++j) a[static_cast<std::size_t>(i * 24 + j)] = a[static_cast<std::size_t>(j * 24 + i)];
  check(a, 24);
}

TEST_CASE("A diagonal matrix gives its entries and the unit vectors", "[compute]") {
  std::vector<double> a(25, 0.0);
  const std::vector<double> entries = {2, 5, -1, 4, 3};
  for (std::size_t i = 0; i < 5; ++i) a[i * 6] = entries[i];
  const EigenPairs pairs = eigh(a, 5);
  CHECK(test::largest_difference(pairs.values, std::vector<double>{5, 4, 3, 2, -1}) < 1e-15);
  const int positions[] = {1, 3, 4, 0, 2};
  for (int j = 0; j < 5; ++j) {
    std::vector<double> unit(5, 0.0);
    unit[static_cast<std::size_t>(positions[j])] = 1.0;
    CHECK(test::largest_difference(column(pairs, j, 5), unit) < 1e-15);
  }
  CHECK(eigh(std::vector<double>{-3.0}, 1).values == std::vector<double>{-3.0});
  CHECK(eigh(std::vector<double>{-3.0}, 1).vectors == std::vector<double>{1.0});
}

TEST_CASE("The solver agrees with Jacobi's method", "[compute]") {
  for (const int dim : {3, 16, 64, 96}) {
    const std::vector<double> a = test::random_covariance(dim, 7, 0.85);
    const EigenPairs found = eigh(a, dim), expected = test::jacobi(a, dim);
    INFO("dim " << dim);
    CHECK(test::largest_difference(found.values, expected.values) < 1e-8 * expected.values[0]);
    for (int j = 0; j < std::min(dim, 16);
         ++j) {  // later eigenvalues are too close to separate their vectors this well
      double cosine = 0.0;
      for (int i = 0; i < dim; ++i)
        cosine +=
            column(found, j, dim)[static_cast<std::size_t>(i)] * column(expected, j, dim)[static_cast<std::size_t>(i)];
      CHECK(std::abs(cosine) > 1.0 - 1e-8);
    }
  }
}

TEST_CASE("Of components with the same magnitude the first one is positive", "[compute]") {
  const std::vector<double> a = {2, -1, -1, 2};  // (1, -1) with 3 and (1, 1) with 1
  const EigenPairs pairs = eigh(a, 2);
  CHECK(pairs.values[0] == Approx(3.0));
  CHECK(pairs.vectors[0] > 0.0);
  CHECK(pairs.vectors[2] < 0.0);
  CHECK(pairs.vectors[1] > 0.0);
}

TEST_CASE("A matrix that is not finite is refused", "[compute]") {
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    std::vector<double> a = test::identity(4);
    a[0] = bad;
    CHECK_THAT(test::error_text([&] { eigh(a, 4); }), StartsWith("numerical: "));
    a = test::identity(4);
    a[1] = a[4] = bad;
    CHECK_THAT(test::error_text([&] { eigh(a, 4); }), StartsWith("numerical: "));
  }
}
