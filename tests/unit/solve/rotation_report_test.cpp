#include <kvq/codec/codec.h>
#include <kvq/compute/eigh.h>
#include <kvq/solve/rotation_report.h>
#include <kvq/solve/spectral.h>

#include "support/compare.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>

using namespace kvq;

namespace {

constexpr int kDim = 64, kGroup = 16;
constexpr std::size_t kRows = 50;

RotationRow expected_row(const std::vector<float>& rows, const std::vector<double>& c, const std::vector<double>& r) {
  RotationRow row;
  const UniformCoder coder{.bits = 2, .group_size = kGroup};
  for (std::size_t t = 0; t < kRows; ++t) {
    std::vector<float> x(kDim);
    for (std::size_t j = 0; j < kDim; ++j) {
      double sum = 0.0;
      for (std::size_t i = 0; i < kDim; ++i) sum += static_cast<double>(rows[t * kDim + i]) * r[i * kDim + j];
      x[j] = static_cast<float>(sum);
      row.largest = std::max(row.largest, std::abs(sum));
    }
    for (std::size_t g = 0; g < kDim / kGroup; ++g) {
      const auto [low, high] = std::minmax_element(x.begin() + static_cast<std::ptrdiff_t>(g * kGroup),
                                                   x.begin() + static_cast<std::ptrdiff_t>((g + 1) * kGroup));
      row.group_range += static_cast<double>(*high - *low) / static_cast<double>(kRows * kDim / kGroup);
    }
    std::vector<float> coded = x;
    quantize_row(coder, 1.0, coded);
    for (std::size_t j = 0; j < kDim; ++j)
      row.error_trace +=
          std::pow(static_cast<double>(coded[j]) - static_cast<double>(x[j]), 2) / static_cast<double>(kRows);
  }
  const std::vector<double> rotated = test::conjugate(c, r, kDim);
  const double mean = test::trace(rotated, kDim) / kDim;
  for (std::size_t i = 0; i < kDim; ++i) {
    row.importance_peak = std::max(row.importance_peak, rotated[i * (kDim + 1)] / mean);
    row.importance_spread = std::max(
        row.importance_spread, std::abs(rotated[i * (kDim + 1)] / mean - 1.0));  // one block: its mean is the mean
  }
  return row;
}

}  // namespace

TEST_CASE("The rotation table holds what OSCAR Table 10 holds", "[solve]") {
  const FitData data{.dim = kDim, .rows = test::rows_with_outliers(kRows, kDim, 1)};
  const std::vector<double> c = test::random_covariance(kDim, 2, 0.8), basis = eigh(c, kDim).vectors;
  const std::vector<RotationRow> rows = rotation_rows(data, c, kGroup);
  REQUIRE(rows.size() == 5);
  const char* recipes[] = {"I", "H", "U", "U*H", "U*H*P"};
  const char* names[] = {"", "h", "u", "uh", "uhp"};
  for (std::size_t i = 0; i < 5; ++i) {
    INFO(recipes[i]);
    CHECK(rows[i].recipe == recipes[i]);
    std::vector<double> r = test::identity(kDim);
    if (rows[i].recipe == "H")
      r = test::sylvester_blocks(kDim, kDim);
    else if (i > 0)
      r = compose(*find_composition(names[i]), basis, kDim, kDim);
    const RotationRow expected = expected_row(data.rows, c, r);
    CHECK(rows[i].largest == Approx(expected.largest).epsilon(1e-5));
    CHECK(rows[i].group_range == Approx(expected.group_range).epsilon(1e-5));
    CHECK(rows[i].importance_peak == Approx(expected.importance_peak).epsilon(1e-5));
    CHECK(rows[i].importance_spread == Approx(expected.importance_spread).margin(1e-5));
    CHECK(rows[i].error_trace == Approx(expected.error_trace).epsilon(1e-2));  // a code may differ at a rounding edge
  }
  CHECK(rows[3].importance_peak == Approx(1.0).epsilon(1e-6));  // Lemma 1
  CHECK(rows[4].importance_peak == Approx(1.0).epsilon(1e-6));
  CHECK(rows[3].importance_spread < 1e-6);
  CHECK(rows[0].importance_peak > 1.1);
}

TEST_CASE("Alignment is one for equal eigenbases and small for unrelated ones", "[solve]") {
  const std::vector<double> c = test::random_covariance(96, 1, 0.8);
  CHECK(top8_alignment(c, c, 96) == Approx(1.0).epsilon(1e-9));
  double sum = 0.0;
  for (std::uint64_t seed = 2; seed < 22; ++seed)
    sum += top8_alignment(c, test::random_covariance(96, seed, 0.8), 96) / 20;
  CHECK(sum == Approx(std::sqrt(2.0 / (3.14159265 * 96))).epsilon(0.25));
  const std::vector<double> inverse =
      test::random_covariance(96, 1, 1.0 / 0.8);  // large eigenvalues where those of c are small
  CHECK(top8_alignment(c, inverse, 96) < 1e-6);
}
