#include <kvq/codec/codec.h>
#include <kvq/compute/coded_error.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <limits>
#include <set>

using namespace kvq;
using Catch::Matchers::StartsWith;

namespace {

constexpr int kDim = 16;
constexpr std::size_t kRows = 37;

std::vector<float> random_weights(std::uint64_t seed) {
  std::vector<float> weights = test::gaussian(kRows, seed);
  for (float& weight : weights) weight = std::abs(weight);
  return weights;
}

/// sum_t w_t e_t M e_t^T
double cost_of(const std::vector<double>& errors, const std::vector<float>& metric, const std::vector<float>& weights) {
  double cost = 0.0;
  for (std::size_t t = 0; t < errors.size() / kDim; ++t) {
    double row = 0.0;
    for (std::size_t i = 0; i < kDim; ++i)
      for (std::size_t j = 0; j < kDim; ++j) {
        const double m = metric.empty() ? (i == j ? 1.0 : 0.0) : static_cast<double>(metric[i * kDim + j]);
        row += errors[t * kDim + i] * m * errors[t * kDim + j];
      }
    cost += row * (weights.empty() ? 1.0 : static_cast<double>(weights[t]));
  }
  return cost;
}

std::vector<double> coding_errors(const RotatedData& data, const Coder& coder, double clip) {
  std::vector<float> coded = data.rows;
  for (std::size_t t = 0; t < coded.size() / kDim; ++t)
    quantize_row(coder, clip, std::span(coded).subspan(t * kDim, kDim));
  std::vector<double> errors(coded.size());
  for (std::size_t i = 0; i < coded.size(); ++i)
    errors[i] = static_cast<double>(data.rows[i]) - static_cast<double>(coded[i]);
  return errors;
}

RotatedData rotated_data(std::uint64_t seed, bool metric, bool weights) {
  const std::vector<double> m = test::random_covariance(kDim, seed);
  return {
      .dim = kDim,
      .rows = test::rows_with_outliers(kRows, kDim, seed, 5.0),
      .metric = metric ? std::vector<float>(m.begin(), m.end()) : std::vector<float>{},
      .weights = weights ? random_weights(seed) : std::vector<float>{},
  };
}

const Coder kCoders[] = {
    UniformCoder{.bits = 2, .group_size = 8}, UniformCoder{.bits = 4, .group_size = 16, .zero = ZeroKind::integer},
    UniformCoder{.bits = 3, .group_size = 4, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm},
    ExactCoder{}};

}  // namespace

TEST_CASE("Rotated data is (x - center) @ R with the metric in the same basis", "[compute]") {
  const std::vector<double> r = test::random_orthogonal(kDim, 4), m = test::random_covariance(kDim, 5);
  const std::vector<float> center = test::gaussian(kDim, 6);
  const FitData data{
      .dim = kDim,
      .rows = test::gaussian(kRows * kDim, 7, 3.0),
      .metric = m,
      .weights = random_weights(8),
  };
  CHECK(data.count() == static_cast<std::int64_t>(kRows));
  for (const bool rotates : {false, true})
    for (const bool centered : {false, true}) {
      INFO("rotation " << rotates << ", center " << centered);
      const RotatedData found = rotate(data, rotates ? std::span<const double>(r) : std::span<const double>(),
                                       centered ? std::span<const float>(center) : std::span<const float>());
      const std::vector<double> basis = rotates ? r : test::identity(kDim);
      std::vector<double> expected(kRows * kDim, 0.0);
      for (std::size_t t = 0; t < kRows; ++t)
        for (std::size_t i = 0; i < kDim; ++i)
          for (std::size_t j = 0; j < kDim; ++j)
            expected[t * kDim + j] +=
                (static_cast<double>(data.rows[t * kDim + i]) - (centered ? static_cast<double>(center[i]) : 0.0)) *
                basis[i * kDim + j];
      CHECK(found.dim == kDim);
      CHECK(test::largest_difference(found.rows, expected) < 1e-5);
      CHECK(test::largest_difference(found.metric, test::conjugate(m, basis, kDim)) < 1e-6);
      CHECK(found.weights == data.weights);
    }
  const RotatedData plain = rotate({.dim = kDim, .rows = data.rows}, r, {});
  CHECK(plain.metric.empty());
  CHECK(plain.weights.empty());
}

TEST_CASE("Coding cost and energy are the weighted quadratic forms of error and row", "[compute]") {
  for (const bool metric : {false, true})
    for (const bool weights : {false, true}) {
      const RotatedData data = rotated_data(3, metric, weights);
      INFO("metric " << metric << ", weights " << weights);
      CHECK(energy(data) == Approx(cost_of(test::widened(data.rows), data.metric, data.weights)).epsilon(1e-5));
      for (const Coder& coder : kCoders)
        for (const double clip : {1.0, 0.9})
          CHECK(coding_cost(data, coder, clip) ==
                Approx(cost_of(coding_errors(data, coder, clip), data.metric, data.weights)).epsilon(1e-5));
    }
}

TEST_CASE("The error covariance is the mean outer product of the coding errors", "[compute]") {
  const RotatedData data = rotated_data(9, false, false);
  for (const Coder& coder : kCoders) {
    const std::vector<double> errors = coding_errors(data, coder, 0.95);
    std::vector<double> expected(kDim * kDim, 0.0);
    for (std::size_t t = 0; t < kRows; ++t)
      for (std::size_t i = 0; i < kDim; ++i)
        for (std::size_t j = 0; j < kDim; ++j)
          expected[i * kDim + j] += errors[t * kDim + i] * errors[t * kDim + j] / static_cast<double>(kRows);
    CHECK(test::relative_difference(error_covariance(data, RowCodec(coder, 0.95, kDim)), expected) < 1e-6);
  }
}

TEST_CASE("The clip cost weighs what is along the rows apart from the rest", "[compute]") {
  for (const bool metric : {false, true})
    for (const double shrink : {0.5, 1.0, 4.0}) {
      RotatedData data = rotated_data(5, metric, true);
      data.shrink_weight = shrink;
      INFO("metric " << metric << ", weight " << shrink);
      for (const Coder& coder : kCoders) {
        // e = -a x + r, where a minimizes r under the metric. The test finds a from the values at neighboring points.
        const std::vector<double> errors = coding_errors(data, coder, 0.9), rows = test::widened(data.rows);
        const auto rest = [&](double a) {
          std::vector<double> r = errors;
          for (std::size_t i = 0; i < r.size(); ++i) r[i] = -r[i] + a * rows[i];  // coding_errors has the other sign
          return cost_of(r, data.metric, data.weights);
        };
        const double middle = rest(0.0), right = rest(1.0), left = rest(-1.0);
        const double a = (left - right) / (2.0 * (left + right - 2.0 * middle));  // minimum of the parabola
        const double expected = rest(a) + shrink * a * a * cost_of(rows, data.metric, data.weights);
        CHECK(clip_cost(data, RowCodec(coder, 0.9, kDim)) == Approx(expected).epsilon(1e-4));
        if (shrink == 1.0)
          CHECK(clip_cost(data, RowCodec(coder, 0.9, kDim)) == Approx(coding_cost(data, coder, 0.9)).epsilon(1e-9));
      }
    }
}

TEST_CASE("Costs of rows that are not finite are refused", "[compute]") {
  for (const Coder& coder : kCoders)
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      RotatedData data = rotated_data(3, false, false);
      data.rows[5 * kDim + 2] = bad;
      const auto refused = [](auto cost) {
        CHECK_THAT(test::error_text(cost), StartsWith("numerical: row to encode: "));
      };
      refused([&] { coding_cost(data, coder, 1.0); });
      refused([&] { clip_cost(data, RowCodec(coder, 0.9, kDim)); });
      refused([&] { error_covariance(data, RowCodec(coder, 1.0, kDim)); });
      refused([&] { coding_cost(FitData{.dim = kDim, .rows = data.rows}, RowCodec(coder, 1.0, kDim)); });
    }
}
