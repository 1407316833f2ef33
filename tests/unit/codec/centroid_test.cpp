#include <kvq/codec/codec.h>
#include <kvq/codec/row_codec.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/matrix.h"
#include "support/random_data.h"
#include "support/row_plans.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>

using namespace kvq;

namespace {

/// tree(d d) with d = x - m; every step is rounded to binary32.
float squared_distance(const float* x, const float* m, std::size_t dim) {
  std::vector<float> numbers;
  for (std::size_t j = 0; j < dim; ++j) {
    const float d = x[j] - m[j];
    numbers.push_back(d * d);
  }
  while ((numbers.size() & (numbers.size() - 1)) != 0) numbers.push_back(0.0f);
  while (numbers.size() > 1) {
    for (std::size_t i = 0; i < numbers.size() / 2; ++i) numbers[i] = numbers[2 * i] + numbers[2 * i + 1];
    numbers.resize(numbers.size() / 2);
  }
  return numbers[0];
}

Centroids random_centroids(int heads, int count, int dim, std::uint64_t seed) {
  TensorPlan plan;
  test::add_centroids(plan, dim, count, seed, heads);
  return *plan.centroids;
}

}  // namespace

TEST_CASE("The nearest centroid is that of the smallest tree sum, the first of equal ones", "[codec][centroids]") {
  test::Random random(1);
  for (const int dim : {1, 3, 8, 33, 128}) {
    Centroids centroids = random_centroids(2, 20, dim, random.bits());
    const auto d = static_cast<std::size_t>(dim);
    for (int entry = 0; entry < 2; ++entry) {
      float* values = centroids.values.data() + static_cast<std::size_t>(entry) * 20 * d;
      std::copy_n(values + 4 * d, d, values + 17 * d);  // a second copy of one centroid
      for (int round = 0; round < 30; ++round) {
        std::vector<float> x = test::gaussian(d, random.bits());
        if (round % 3 == 0) x.assign(values + 4 * d, values + 5 * d);
        std::vector<float> sums(20), expected(20);
        for (std::size_t c = 0; c < 20; ++c) expected[c] = squared_distance(x.data(), values + c * d, d);
        add_centroid_distances(centroids, entry, x, sums);
        CHECK(test::first_bit_difference(sums, expected) == "");
        CHECK(nearest_centroid(centroids, entry, x) ==
              std::min_element(expected.begin(), expected.end()) - expected.begin());
        add_centroid_distances(centroids, entry, x, sums);  // adds to the sums so far
        for (float& sum : expected) sum += sum;
        CHECK(test::first_bit_difference(sums, expected) == "");
      }
    }
  }
}

TEST_CASE("Rows are coded as residuals of their centroid and put back on it", "[codec][centroids]") {
  for (const int coder : {0, 1, 2}) {
    TensorPlan plan = test::mixed_plan({8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 2, 1}, 12, coder, ScaleType::fp16, 3);
    test::add_centroids(plan, 12, 7, 4);
    plan.rotation.kind = RotationKind::dense;
    const std::vector<double> matrix = test::random_orthogonal(12, 9);
    plan.rotation.matrix.assign(matrix.begin(), matrix.end());
    std::vector<float> x = test::gaussian(12 * 5, 11), expected = x;
    const RowCodec codec(plan, 0, 12);
    for (std::size_t t = 0; t < 5; ++t) {
      const std::span<float> row = std::span(expected).subspan(12 * t, 12);
      const int a = nearest_centroid(*plan.centroids, 0, row);
      std::vector<float> residual(12);
      for (std::size_t j = 0; j < 12; ++j)
        residual[j] = row[j] - plan.centroids->values[static_cast<std::size_t>(a) * 12 + j];
      std::vector<float> rotated(12), by_codec(12);
      for (std::size_t j = 0; j < 12; ++j) {
        double sum = 0.0;
        for (std::size_t i = 0; i < 12; ++i)
          sum += static_cast<double>(residual[i]) * static_cast<double>(plan.rotation.matrix[i * 12 + j]);
        rotated[j] = static_cast<float>(sum);
      }
      rotate_row(plan, 0, row, by_codec, a);
      CHECK(test::largest_difference(by_codec, rotated) < 1e-6);
      codec.quantize(by_codec);
      unrotate_row(plan, 0, by_codec, row, a);
    }
    std::vector<float> all = x;
    reconstruct(plan, 0, all, 12);
    CHECK(test::first_bit_difference(all, expected) == "");
    std::vector<float> heads = x;
    reconstruct_heads(plan, 1, heads, 12);
    CHECK(test::first_bit_difference(heads, expected) == "");
  }
}

TEST_CASE("Scope joint: the sum over heads decides, and all heads take the same centroid", "[codec][centroids]") {
  constexpr int kHeads = 3, kRows = 40, kDim = 8;
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = 4, .group_size = 8, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  test::add_centroids(plan, kDim, 6, 5, kHeads);
  plan.centroids->joint = true;
  const std::vector<float> x = test::gaussian(kHeads * kRows * kDim, 6);
  std::vector<float> found = x;
  reconstruct_heads(plan, kHeads, found, kDim);
  const auto row_at = [&](int head, int row) { return static_cast<std::size_t>((head * kRows + row) * kDim); };
  int alone = 0;
  for (int row = 0; row < kRows; ++row) {
    std::vector<float> sums(6, 0.0f);
    for (int head = 0; head < kHeads; ++head)
      for (std::size_t c = 0; c < 6; ++c)
        sums[c] +=
            squared_distance(x.data() + row_at(head, row),
                             plan.centroids->values.data() + (static_cast<std::size_t>(head) * 6 + c) * kDim, kDim);
    const auto a = static_cast<int>(std::min_element(sums.begin(), sums.end()) - sums.begin());
    for (int head = 0; head < kHeads; ++head) {
      const std::vector<float> in(x.begin() + static_cast<std::ptrdiff_t>(row_at(head, row)),
                                  x.begin() + static_cast<std::ptrdiff_t>(row_at(head, row)) + kDim);
      alone += nearest_centroid(*plan.centroids, head, in) == a ? 1 : 0;
      std::vector<float> residual(kDim), out(kDim);
      rotate_row(plan, head, in, residual, a);
      RowCodec(plan, head, kDim).quantize(residual);
      unrotate_row(plan, head, residual, out, a);
      CHECK(test::first_bit_difference(out, std::span(found).subspan(row_at(head, row), kDim)) == "");
    }
  }
  CHECK(alone < kHeads * kRows);  // otherwise the test could not tell the scopes apart
  std::vector<float> one(x.begin(), x.begin() + kRows * kDim);
  CHECK_THAT(test::error_text([&] { reconstruct(plan, 0, one, kDim); }), Catch::Matchers::StartsWith("internal: "));
}

TEST_CASE("A row that is not finite is nearest to the first centroid, and in scope joint so are all heads of its token",
          "[codec][centroids]") {
  test::Random random(12);
  for (int round = 0; round < 50; ++round) {
    const Centroids centroids = random_centroids(2, 7, 8, random.bits());
    std::vector<float> x = test::gaussian(8, random.bits()), other = test::gaussian(8, random.bits()), sums(7);
    test::spoil(x, random);
    CHECK(nearest_centroid(centroids, 0, x) == 0);
    add_centroid_distances(centroids, round % 2, x, sums);
    add_centroid_distances(centroids, (round + 1) % 2, other, sums);
    CHECK(std::min_element(sums.begin(), sums.end()) == sums.begin());
  }
}

TEST_CASE("A row on a centroid is stored exactly", "[codec][centroids]") {
  TensorPlan plan;
  plan.coder = test::codebook_coder(2, 16, ScaleRule::norm, ScaleType::fp16, 1);
  test::add_centroids(plan, 16, 9, 8);
  std::vector<float> x = plan.centroids->values;
  reconstruct(plan, 0, x, 16);
  CHECK(test::first_bit_difference(x, plan.centroids->values) == "");
}
