#include <kvq/codec/codec.h>
#include <kvq/codec/rotation_matrix.h>

#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

using namespace kvq;

namespace {

constexpr int kDim = 24, kHeads = 2;
constexpr std::size_t kSize = kDim;

Rotation rotation_of(RotationKind kind, bool scaled) {
  Rotation rotation{.kind = kind};
  test::Random random(5);
  if (kind == RotationKind::block_hadamard) {
    rotation.order = 8;
    for (std::size_t i = 0; i < kHeads * kSize; ++i)
      rotation.signs.push_back(random.bits() & 1u ? std::int8_t{1} : std::int8_t{-1});
  }
  if (scaled && kind != RotationKind::dense)
    for (std::size_t i = 0; i < kHeads * kSize; ++i) rotation.channel_scale.push_back(i % 3 == 0 ? 16.0f : 0.25f);
  for (std::uint64_t h = 0; h < kHeads && kind == RotationKind::dense; ++h) {
    const std::vector<double> own = test::random_orthogonal(kDim, h + 1);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const double row = scaled ? 1.0 + static_cast<double>(i / kSize) : 1.0,
                   column = scaled ? 1.0 + static_cast<double>(i % kSize) : 1.0;
      rotation.matrix.push_back(static_cast<float>(own[i] * row));
      if (scaled) rotation.inverse.push_back(static_cast<float>(own[i % kSize * kSize + i / kSize] / column));
    }
  }
  return rotation;
}

std::vector<double> times(const std::vector<float>& x, const std::vector<double>& matrix) {
  std::vector<double> y(kSize, 0.0);
  for (std::size_t i = 0; i < kSize; ++i)
    for (std::size_t j = 0; j < kSize; ++j)
      y[j] += double{x[i]} * (matrix.empty() ? (i == j ? 1.0 : 0.0) : matrix[i * kSize + j]);
  return y;
}

}  // namespace

TEST_CASE("The matrix of a rotation and its inverse do what its rows undergo", "[codec]") {
  const auto kind = GENERATE(RotationKind::identity, RotationKind::block_hadamard, RotationKind::dense);
  const bool scaled = GENERATE(false, true);
  const TensorPlan plan{.rotation = rotation_of(kind, scaled)};
  for (int h = 0; h < kHeads; ++h) {
    CAPTURE(to_string(kind), scaled, h);
    const std::vector<double> matrix = rotation_matrix(plan.rotation, h, kDim),
                              inverse = inverse_matrix(plan.rotation, h, kDim);
    CHECK(matrix.empty() == (kind == RotationKind::identity && !scaled));
    CHECK(inverse.empty() == matrix.empty());
    const std::vector<float> x = test::gaussian(kSize, 7);
    std::vector<float> rotated(kSize), back(kSize);
    rotate_row(plan, h, x, rotated);
    unrotate_row(plan, h, x, back);
    const std::vector<double> there = times(x, matrix), undone = times(x, inverse);
    for (std::size_t j = 0; j < kSize; ++j) {
      CHECK(rotated[j] == Approx(there[j]).epsilon(1e-6).margin(1e-6));
      CHECK(back[j] == Approx(undone[j]).epsilon(1e-6).margin(1e-6));
    }
    if (matrix.empty()) continue;
    const std::vector<double> both = test::multiply(matrix, inverse, kDim);
    for (std::size_t i = 0; i < both.size(); ++i)
      CHECK(both[i] == Approx(i % (kSize + 1) == 0 ? 1.0 : 0.0).margin(1e-5));
  }
}
