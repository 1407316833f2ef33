#include <kvq/compute/moment.h>

#include "support/compare.h"
#include "support/naive_attention.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <limits>

using namespace kvq;

namespace {

struct Naive {
  std::vector<double> sum, first;
  double weight = 0.0;
};

Naive naive(std::span<const float> rows, std::span<const float> weights, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  Naive result{std::vector<double>(d * d), std::vector<double>(d)};
  for (std::size_t row = 0; row < rows.size() / d; ++row) {
    const double weight = weights.empty() ? 1.0 : static_cast<double>(weights[row]);
    test::add_outer(test::widened(rows.subspan(row * d, d)), weight, result.sum, result.first);
    result.weight += weight;
  }
  return result;
}

std::vector<float> random_weights(std::size_t count, std::uint64_t seed) {
  std::vector<float> weights = test::gaussian(count, seed);
  for (float& weight : weights) weight = std::abs(weight);
  return weights;
}

}  // namespace

TEST_CASE("A moment is the sum of outer products, with and without weights", "[compute]") {
  for (const int dim : {1, 2, 7, 64, 80, 128})
    for (const std::size_t rows : {0u, 1u, 2u, 31u, 129u, 517u})
      for (const bool weighted : {false, true}) {
        INFO("dim " << dim << ", rows " << rows << ", weighted " << weighted);
        const std::vector<float> x = test::rows_with_outliers(rows, dim, rows + static_cast<std::size_t>(dim), 100.0);
        const std::vector<float> weights = weighted ? random_weights(rows, 4) : std::vector<float>{};
        MomentSum moment(dim);
        moment.add(x, weights);
        moment.symmetrize();
        const Naive expected = naive(x, weights, dim);
        CHECK(test::relative_difference(moment.sum, expected.sum) < 1e-12);
        CHECK(test::relative_difference(moment.mean, expected.first) < 1e-12);
        CHECK(moment.weight == Approx(expected.weight).epsilon(1e-12));
      }
}

TEST_CASE("A symmetrized moment is symmetric, also after it was merged", "[compute]") {
  MomentSum a(33), b(33);
  a.add(test::gaussian(33 * 50, 1));
  b.add(test::gaussian(33 * 70, 2));
  b.symmetrize();
  a.add(b);
  a.symmetrize();
  for (std::size_t i = 0; i < 33; ++i)
    for (std::size_t j = 0; j < 33; ++j)
      if (a.sum[i * 33 + j] != a.sum[j * 33 + i]) FAIL(i << ", " << j);
}

TEST_CASE("Merging moments is associative, and any split gives the joint sum", "[compute]") {
  constexpr int kDim = 24;
  const std::vector<float> rows = test::rows_with_outliers(300, kDim, 3), weights = random_weights(300, 5);
  const auto part = [&](std::size_t first, std::size_t count) {
    MomentSum moment(kDim);
    moment.add(std::span(rows).subspan(first * kDim, count * kDim), std::span(weights).subspan(first, count));
    return moment;
  };
  MomentSum joint = part(0, 300), left = part(0, 7), right = part(108, 192), middle = part(7, 101);
  MomentSum right_first = middle;
  left.add(middle);
  left.add(part(108, 192));
  right_first.add(right);
  MomentSum outer = part(0, 7);
  outer.add(right_first);
  for (MomentSum* moment : {&joint, &left, &outer}) moment->symmetrize();
  CHECK(test::relative_difference(left.sum, outer.sum) < 1e-13);
  CHECK(test::relative_difference(left.mean, outer.mean) < 1e-13);
  CHECK(test::relative_difference(left.sum, joint.sum) < 1e-13);
  CHECK(left.weight == Approx(joint.weight).epsilon(1e-13));
}

TEST_CASE("A moment keeps what float32 sums would lose", "[compute]") {
  MomentSum moment(1);
  moment.add(std::vector<float>{1e8f, 1.0f, 1e-8f});
  CHECK(moment.sum[0] == 1e16 + 1.0);
  moment = MomentSum(1);
  moment.add(std::vector<float>{3e38f, 3e38f});  // the square overflows float
  CHECK(std::isfinite(moment.sum[0]));
}
