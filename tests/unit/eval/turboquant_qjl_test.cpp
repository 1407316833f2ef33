#include <kvq/eval/turboquant_qjl.h>

#include <kvq/core/error.h>
#include <kvq/eval/scheme.h>

#include "support/compare.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <numbers>

using namespace kvq;

namespace {

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

/// Mean and mean square of <q, x_hat> - <q, x> over seeds, for |q| = |x| = 1.
struct Bias {
  double mean = 0.0, square = 0.0;
};

std::vector<float> unit(std::vector<float> x) {
  const double length = std::sqrt(dot(x, x));
  for (float& value : x) value = static_cast<float>(value / length);
  return x;
}

Bias bias(int dim, int bits, int seeds) {
  const std::vector<float> x = unit(test::gaussian(static_cast<std::size_t>(dim), 1)),
                           q = unit(test::gaussian(static_cast<std::size_t>(dim), 2));
  Bias found;
  for (int seed = 0; seed < seeds; ++seed) {
    std::vector<float> row = x;
    TurboQuantQjl(dim, bits, static_cast<std::uint64_t>(seed), 3, 1).reconstruct(row);
    const double error = dot(q, row) - dot(q, x);
    found.mean += error / seeds;
    found.square += error * error / seeds;
  }
  return found;
}

}  // namespace

TEST_CASE("Inner products of QJL codes are unbiased, with the variance that the sketch of the residual has",
          "[eval][qjl]") {
  constexpr int kDim = 32, kSeeds = 2000;
  // Mean square error of the first b - 1 bits, Lloyd-Max on a Gaussian. The residual r adds pi / 2 |q|^2 |r|^2 / d,
  // less <q, r>^2 / d.
  const double distortion[] = {1.0, 1.0, 0.36, 0.117, 0.0345};
  for (const int bits : {1, 2, 3, 4}) {
    const Bias found = bias(kDim, bits, kSeeds);
    INFO(bits << " bits: mean " << found.mean << ", mean square " << found.square);
    const double expected = std::numbers::pi / 2.0 * distortion[bits] / kDim;
    CHECK(found.square == Approx(expected).epsilon(0.12));
    CHECK(std::abs(found.mean) < 4.0 * std::sqrt(found.square / kSeeds));
  }
}

TEST_CASE("QJL rows keep zeros, lengths and their seed", "[eval][qjl]") {
  constexpr int kDim = 48;
  const TurboQuantQjl coder(kDim, 3, 7, 0, 0);
  std::vector<float> zeros(kDim, 0.0f);
  coder.reconstruct(zeros);
  CHECK(zeros == std::vector<float>(kDim, 0.0f));

  const std::vector<float> x = test::gaussian(3 * kDim, 5);
  std::vector<float> a = x, b = x, doubled = x, other = x;
  coder.reconstruct(a);
  TurboQuantQjl(kDim, 3, 7, 0, 0).reconstruct(b);
  CHECK(test::first_bit_difference(a, b) == "");
  TurboQuantQjl(kDim, 3, 8, 0, 0).reconstruct(other);
  CHECK(test::first_bit_difference(a, other) != "");
  for (float& value : doubled) value *= 2.0f;
  coder.reconstruct(doubled);
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(doubled[i] == Approx(2.0 * a[i]).margin(2e-3));
  CHECK(TurboQuantQjl::effective_bits(128, 3) == 3.25);
}

TEST_CASE("turboquant-qjl codes keys by the product, values like tq-mse", "[eval][qjl]") {
  LayerGeometry geometry;
  geometry.num_q_heads = geometry.num_kv_heads = 2;
  geometry.head_dim = geometry.v_head_dim = 16;
  const StoredLayer qjl = find_scheme("turboquant-qjl-3").of_layer(geometry, 1, 5),
                    mse = find_scheme("tq-mse-3").of_layer(geometry, 1, 5);
  const std::vector<float> x = test::gaussian(5 * 16, 3);
  const auto restored = [&](const StoredSide& side, int head) {
    std::vector<float> rows = x;
    side.restore({}, 0, head, rows);
    return rows;
  };
  CHECK(restored(*qjl.v, 1) == restored(*mse.v, 1));
  CHECK(restored(*qjl.k, 1) != restored(*mse.k, 1));
  CHECK(restored(*qjl.k, 0) != restored(*qjl.k, 1));  // each head has its own sketch
  CHECK(restored(*find_scheme("turboquant-qjl").of_layer(geometry, 1, 5).k, 0) ==
        restored(*find_scheme("turboquant-qjl-2").of_layer(geometry, 1, 5).k, 0));
  CHECK(find_scheme("turboquant-qjl-3-k").of_layer(geometry, 1, 5).v == nullptr);
  CHECK_THROWS_AS(find_scheme("turboquant-qjl-9"), Error);
}
