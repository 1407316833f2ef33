#include <kvq/core/error.h>
#include <kvq/plan/rotation.h>
#include <kvq/solve/structured.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <set>

using namespace kvq;
using Catch::Matchers::StartsWith;

TEST_CASE("Bit reversal puts the largest where OSCAR A.4 puts them", "[solve]") {
  const std::vector<int> places = bit_reversal_places(128);
  CHECK(std::vector<int>(places.begin(), places.begin() + 8) == std::vector<int>{0, 64, 32, 96, 16, 80, 48, 112});
  CHECK(places[127] == 127);
  CHECK(places[1] == 64);
  CHECK(places[64] == 1);
}

TEST_CASE("Bit reversal is a permutation for every length, and its own inverse for powers of two", "[solve]") {
  for (int n = 1; n <= 200; ++n) {
    const std::vector<int> places = bit_reversal_places(n);
    REQUIRE(places.size() == static_cast<std::size_t>(n));
    REQUIRE(std::set<int>(places.begin(), places.end()).size() == static_cast<std::size_t>(n));
    REQUIRE(*std::min_element(places.begin(), places.end()) == 0);
    REQUIRE(*std::max_element(places.begin(), places.end()) == n - 1);
    if ((n & (n - 1)) != 0) continue;
    for (int k = 0; k < n; ++k) REQUIRE(places[static_cast<std::size_t>(places[static_cast<std::size_t>(k)])] == k);
  }
}

TEST_CASE("For every power-of-two group the largest go to different groups, and every prefix is spread evenly",
          "[solve]") {
  for (int n = 1; n <= 200; ++n) {
    const std::vector<int> places = bit_reversal_places(n);
    for (int group = 1; group <= n; group *= 2) {
      std::vector<int> counts(static_cast<std::size_t>(n / group), 0);  // for the groups that lie entirely below n
      for (const int place : places) {
        if (place / group < n / group) ++counts[static_cast<std::size_t>(place / group)];
        const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
        if (*most - *least > 1) FAIL("n " << n << ", groups of " << group);
      }
    }
  }
}

TEST_CASE("A block Hadamard matrix is Sylvester's, orthogonal and symmetric", "[solve]") {
  for (const auto& [dim, order] :
       {std::pair{1, 1}, {2, 2}, {8, 8}, {8, 2}, {64, 64}, {80, 16}, {96, 32}, {128, 128}, {128, 16}, {7, 1}}) {
    INFO("dim " << dim << ", order " << order);
    const std::vector<double> h = block_hadamard_matrix(dim, order);
    CHECK(test::largest_difference(h, test::sylvester_blocks(dim, order)) < 1e-15);
    CHECK(test::orthogonality_defect(h, dim) < 1e-14);
    CHECK(test::transpose(h, dim) == h);
  }
  CHECK(hadamard_order(96) == 32);
  CHECK(hadamard_order(80) == 16);
}

TEST_CASE("An order that is no power of two or does not divide is a usage error", "[solve]") {
  for (const auto& [dim, order] : {std::pair{96, 3}, {96, 64}, {64, 0}, {64, -2}, {64, 128}, {12, 12}}) {
    INFO("dim " << dim << ", order " << order);
    CHECK_THAT(test::error_text([&, d = dim, n = order] { block_hadamard_matrix(d, n); }), StartsWith("usage: "));
  }
}

TEST_CASE("Butterflies give the product with the matrix, signs first", "[solve]") {
  for (const auto& [dim, order] : {std::pair{1, 1}, {8, 8}, {12, 4}, {64, 64}, {96, 32}, {128, 16}}) {
    const auto d = static_cast<std::size_t>(dim);
    const std::vector<double> h = test::sylvester_blocks(dim, order);
    std::vector<std::int8_t> signs = random_signs(dim, 5, 1, 2);
    for (const bool signed_rows : {false, true}) {
      INFO("dim " << dim << ", order " << order << ", signs " << signed_rows);
      std::vector<float> rows = test::gaussian(3 * d, 1);
      std::vector<double> expected(3 * d, 0.0);
      for (std::size_t row = 0; row < 3; ++row)
        for (std::size_t i = 0; i < d; ++i)
          for (std::size_t j = 0; j < d; ++j)
            expected[row * d + j] +=
                static_cast<double>(rows[row * d + i]) * (signed_rows ? signs[i] : 1) * h[i * d + j];
      block_hadamard_rows(rows, dim, order,
                          signed_rows ? std::span<const std::int8_t>(signs) : std::span<const std::int8_t>());
      CHECK(test::largest_difference(rows, expected) < 2e-6);
    }
  }
}

TEST_CASE("Haar matrices are orthogonal, seeded and uniformly distributed", "[solve]") {
  for (const int dim : {1, 2, 64, 80, 128}) CHECK(test::orthogonality_defect(haar_matrix(dim, 1, 2, 3), dim) < 1e-12);
  CHECK(haar_matrix(16, 1, 2, 3) == haar_matrix(16, 1, 2, 3));
  for (const auto& other : {haar_matrix(16, 2, 2, 3), haar_matrix(16, 1, 3, 3), haar_matrix(16, 1, 2, 4)})
    CHECK(other != haar_matrix(16, 1, 2, 3));

  // Moments of the uniform distribution: each entry has mean 0, mean square 1/n and mean fourth power 3 / (n (n + 2));
  // the trace has mean 0 and variance 1. QR without fixed signs of R gives other traces.
  constexpr int kDim = 4, kCount = 4000;
  std::vector<double> mean(16), square(16), fourth(16);
  double trace = 0.0, trace_square = 0.0;
  for (std::uint64_t seed = 0; seed < kCount; ++seed) {
    const std::vector<double> r = haar_matrix(kDim, seed, 0, 0);
    for (std::size_t i = 0; i < 16; ++i) {
      mean[i] += r[i] / kCount;
      square[i] += r[i] * r[i] / kCount;
      fourth[i] += std::pow(r[i], 4) / kCount;
    }
    trace += test::trace(r, kDim) / kCount;
    trace_square += std::pow(test::trace(r, kDim), 2) / kCount;
  }
  const double five_errors = 5.0 / std::sqrt(static_cast<double>(kCount));
  for (std::size_t i = 0; i < 16; ++i) {
    CHECK(std::abs(mean[i]) < 0.5 * five_errors);
    CHECK(std::abs(square[i] - 0.25) < 0.25 * five_errors);
    CHECK(std::abs(fourth[i] - 3.0 / 24.0) < 0.2 * five_errors);
  }
  CHECK(std::abs(trace) < five_errors);
  CHECK(std::abs(trace_square - 1.0) < 1.5 * five_errors);
}

TEST_CASE("Random signs are +1 and -1, seeded, balanced and different for every head", "[solve]") {
  int sum = 0;
  std::set<std::vector<std::int8_t>> seen;
  for (int layer = 0; layer < 8; ++layer)
    for (int head = 0; head < 8; ++head) {
      const std::vector<std::int8_t> signs = random_signs(128, 3, layer, head);
      REQUIRE(signs.size() == 128);
      for (const std::int8_t sign : signs) {
        REQUIRE((sign == 1 || sign == -1));
        sum += sign;
      }
      seen.insert(signs);
    }
  CHECK(seen.size() == 64);
  CHECK(std::abs(sum) < 5 * 90);  // 8192 fair signs: standard deviation 90.5
  CHECK(random_signs(128, 3, 1, 1) == random_signs(128, 3, 1, 1));
  CHECK(random_signs(128, 4, 1, 1) != random_signs(128, 3, 1, 1));
}
