#include <kvq/codec/codec.h>
#include <kvq/core/dtype.h>
#include <kvq/runtime/part_rounding.h>

#include "support/random_data.h"
#include "support/served_artifact.h"
#include "support/transforms.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

using namespace kvq;

namespace {

double in_two_parts(float x) {
  const float high = bf16_to_float(float_to_bf16(x));
  return static_cast<double>(high) + static_cast<double>(bf16_to_float(float_to_bf16(x - high)));
}

std::int64_t firm_rows(const GoldenSide& side) {
  return std::accumulate(side.firm.begin(), side.firm.end(), std::int64_t{0});
}

}  // namespace

TEST_CASE("Rows that two parts of a transform rotate are as far off as is said, and within the bound", "[runtime]") {
  constexpr std::size_t kDim = 128;
  const double condition = GENERATE(1.0, 64.0, 1000.0, 4090.0);
  const test::Transform made = test::random_transform(kDim, condition, 1, 3);
  TensorPlan plan;
  plan.rotation = {.kind = RotationKind::dense, .matrix = made.matrix, .inverse = made.inverse};
  CHECK(transform_condition(plan.rotation, 0, kDim) == Approx(condition).epsilon(1e-3).margin(1e-3));
  double worst = 0.0, squares = 0.0;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    std::vector<float> x(kDim);
    unrotate_row(plan, 0, test::gaussian(kDim, 10 + seed), x);
    const double said = row_rounding(plan.rotation, 0, x);
    for (std::size_t j = 0; j < kDim; ++j) {
      double error = 0.0, terms = 0.0;
      for (std::size_t i = 0; i < kDim; ++i) {
        const float a = made.matrix[i * kDim + j];
        error += static_cast<double>(x[i]) * (in_two_parts(a) - static_cast<double>(a));
        terms += std::abs(static_cast<double>(x[i]) * static_cast<double>(a));
      }
      CHECK(std::abs(error) <= 0x1p-17 * terms);
      worst = std::max(worst, std::abs(error) / said), squares += std::pow(error / said, 2);
    }
  }
  CAPTURE(worst, std::sqrt(squares / (30 * kDim)));
  CHECK(worst < 4.0);                             // four standard errors
  CHECK(std::sqrt(squares / (30 * kDim)) > 0.1);  // of the channel where it is largest
}

TEST_CASE("Firm rows of transforms are those that two parts leave alone; of others nothing changes", "[runtime]") {
  const Artifact artifact = test::transformed_artifact({}, 20);
  for (const int layer : {0, 1, 2, 3, 4}) {
    CAPTURE(layer);
    const LayerPlan& plan = artifact.layers[static_cast<std::size_t>(layer)];
    const GoldenRows &given = artifact.golden.at(layer), softened = golden_in_parts(plan, given);
    CHECK(softened.k.bytes == given.k.bytes);
    CHECK((softened.k.firm == given.k.firm) == plan.k.rotation.inverse.empty());
    CHECK((softened.v.firm == given.v.firm) == plan.v->rotation.inverse.empty());
    if (layer == 1) CHECK(firm_rows(softened.k) > 5);  // of 80
    if (layer == 4) CHECK(firm_rows(softened.k) == 0);
    for (std::size_t row = 0; row < given.k.firm.size(); ++row) CHECK(softened.k.firm[row] <= given.k.firm[row]);
    const double rounding = output_rounding(plan, given, 5);
    CHECK((rounding > 0.0) == (layer == 1 || layer == 2 || layer == 4));
    if (layer == 1) CHECK(rounding < 1e-3);
  }
  const Artifact served = test::served_artifact({}, 5);
  CHECK(golden_in_parts(served.layers[4], served.golden.at(4)) == served.golden.at(4));
  CHECK(output_rounding(served.layers[4], served.golden.at(4), 0) == 0.0);
}
