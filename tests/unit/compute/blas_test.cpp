#include <kvq/compute/blas.h>
#include <kvq/compute/row_ops.h>

#include "support/compare.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>

using namespace kvq;

namespace {
constexpr double kExpBound = 2.5e-7;  // relative, as row_ops.h says
}

TEST_CASE("Matrix products are row-major and honor alpha, strides and accumulation", "[compute]") {
  constexpr std::int64_t m = 5, n = 7, k = 11, lda = 13, ldb_nt = 12, ldb_nn = 9, ldc = 8;
  const auto a = test::gaussian(m * lda, 1), b_nt = test::gaussian(n * ldb_nt, 2), b_nn = test::gaussian(k * ldb_nn, 3);
  std::vector<float> start = test::gaussian(m * ldc, 4), nt = start, nn = start, accumulated = start;
  blas::gemm_nt(m, n, k, 0.5f, a.data(), lda, b_nt.data(), ldb_nt, nt.data(), ldc);
  blas::gemm_nn(m, n, k, a.data(), lda, b_nn.data(), ldb_nn, false, nn.data(), ldc);
  blas::gemm_nn(m, n, k, a.data(), lda, b_nn.data(), ldb_nn, true, accumulated.data(), ldc);
  std::vector<double> expected_nt = test::widened(start), expected_nn = expected_nt, expected_accumulated = expected_nt;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double by_nt = 0.0, by_nn = 0.0;
      for (std::int64_t l = 0; l < k; ++l) {
        const auto left = static_cast<double>(a[static_cast<std::size_t>(i * lda + l)]);
        by_nt += left * static_cast<double>(b_nt[static_cast<std::size_t>(j * ldb_nt + l)]);
        by_nn += left * static_cast<double>(b_nn[static_cast<std::size_t>(l * ldb_nn + j)]);
      }
      const auto at = static_cast<std::size_t>(i * ldc + j);
      expected_nt[at] = 0.5 * by_nt;
      expected_nn[at] = by_nn;
      expected_accumulated[at] += by_nn;
    }
  CHECK(test::largest_difference(nt, expected_nt) < 1e-5);  // also: the memory between the rows is unchanged
  CHECK(test::largest_difference(nn, expected_nn) < 1e-5);
  CHECK(test::largest_difference(accumulated, expected_accumulated) < 1e-5);
}

TEST_CASE("The rank-k update adds to the upper triangle alone", "[compute]") {
  constexpr std::int64_t n = 6, rows = 9, lda = 7, ldc = 8;
  const auto a = test::gaussian_double(rows * lda, 1), start = test::gaussian_double(n * ldc, 2);
  std::vector<double> c = start, expected = start;
  blas::syrk(n, rows, a.data(), lda, c.data(), ldc);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = i; j < n; ++j)
      for (std::int64_t r = 0; r < rows; ++r)
        expected[static_cast<std::size_t>(i * ldc + j)] +=
            a[static_cast<std::size_t>(r * lda + i)] * a[static_cast<std::size_t>(r * lda + j)];
  CHECK(test::largest_difference(c, expected) < 1e-13);
}

TEST_CASE("The sweeps over a row are right for every length", "[compute]") {
  for (std::int64_t count = 1; count <= 70; ++count) {
    INFO("count " << count);
    const std::vector<float> start =
        test::gaussian(static_cast<std::size_t>(count) + 3, static_cast<std::uint64_t>(count), 20.0);
    const float top = *std::max_element(start.begin(), start.begin() + count);
    CHECK(row_ops::largest(start.data(), count) == top);

    std::vector<float> row = start, columns(start.size(), 1.0f);
    const float sum = row_ops::exponentiate(row.data(), count, top);
    double expected_sum = 0.0;
    for (std::size_t t = 0; t < static_cast<std::size_t>(count); ++t) {
      const double expected = start[t] - top < -87.0f ? 0.0 : std::exp(static_cast<double>(start[t] - top));
      expected_sum += expected;
      if (std::abs(static_cast<double>(row[t]) - expected) > kExpBound * expected)
        FAIL("exp(" << start[t] - top << ") = " << row[t]);
    }
    CHECK(static_cast<double>(sum) == Approx(expected_sum).epsilon(1e-6));
    row_ops::add_squares(row.data(), count, 0.5f, columns.data());
    for (std::size_t t = 0; t < start.size(); ++t) {
      const double square = t < static_cast<std::size_t>(count) ? std::pow(0.5 * static_cast<double>(row[t]), 2) : 0.0;
      if (std::abs(static_cast<double>(columns[t]) - 1.0 - square) > 2e-7) FAIL("column " << t);
    }
    for (std::size_t t = static_cast<std::size_t>(count); t < start.size(); ++t) CHECK(row[t] == start[t]);
  }
}

TEST_CASE("Exponentials are precise over their whole range and exactly zero below it", "[compute]") {
  std::vector<float> row;
  for (float x = 0.0f; x > -87.0f; x -= 0.00137f) row.push_back(x);
  const std::vector<float> start = row;
  row_ops::exponentiate(row.data(), static_cast<std::int64_t>(row.size()), 0.0f);
  for (std::size_t i = 0; i < row.size(); ++i) {
    const double expected = std::exp(static_cast<double>(start[i]));
    if (std::abs(static_cast<double>(row[i]) - expected) > kExpBound * expected)
      FAIL("exp(" << start[i] << ") = " << row[i]);
  }
  std::vector<float> low = {-87.01f, -100.0f, -1e10f, -3e38f};
  CHECK(row_ops::exponentiate(low.data(), 4, 0.0f) == 0.0f);
  CHECK(low == std::vector<float>(4, 0.0f));
}
