#include <kvq/codec/codec.h>
#include <kvq/plan/rotation.h>
#include <kvq/solve/spectral.h>
#include <kvq/solve/structured.h>

#include "support/compare.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <rapidcheck/catch.h>
#include <catch2/catch.hpp>

#include <bit>
#include <cmath>

using namespace kvq;

namespace {

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

/// A plan of one head with a random kind of rotation.
TensorPlan any_plan(int dim, std::uint64_t seed) {
  TensorPlan plan;
  plan.rotation.kind = *rc::gen::element(RotationKind::identity, RotationKind::block_hadamard, RotationKind::dense);
  if (plan.rotation.kind == RotationKind::block_hadamard) {
    plan.rotation.order = 1 << *rc::gen::inRange(0, std::countr_zero(static_cast<unsigned>(hadamard_order(dim))) + 1);
    if (*rc::gen::arbitrary<bool>()) plan.rotation.signs = random_signs(dim, seed, 0, 0);
  } else if (plan.rotation.kind == RotationKind::dense) {
    const std::vector<double> matrix = test::random_orthogonal(dim, seed);
    plan.rotation.matrix.assign(matrix.begin(), matrix.end());
  }
  if (*rc::gen::arbitrary<bool>()) plan.center = test::gaussian(static_cast<std::size_t>(dim), seed + 1, 4.0);
  return plan;
}

}  // namespace

TEST_CASE("Rotating and rotating back returns the row, for every kind of rotation", "[codec][property]") {
  rc::prop("any dimension", [] {
    const int dim = *rc::gen::inRange(1, 100);
    const std::uint64_t seed = *rc::gen::inRange<std::uint64_t>(0, 1000);
    const TensorPlan plan = any_plan(dim, seed);
    const auto size = static_cast<std::size_t>(dim);
    const std::vector<float> x = test::gaussian(size, seed + 2, 10.0);
    std::vector<float> rotated(size), back(size);
    rotate_row(plan, 0, x, rotated);
    unrotate_row(plan, 0, rotated, back);
    RC_ASSERT(test::largest_difference(back, x) < 2e-5);
  });
}

TEST_CASE("A rotation keeps q . k and every length", "[codec][property]") {
  rc::prop("any dimension", [] {
    const int dim = *rc::gen::inRange(1, 100);
    const std::uint64_t seed = *rc::gen::inRange<std::uint64_t>(0, 1000);
    TensorPlan plan = any_plan(dim, seed);
    plan.center.clear();
    const auto size = static_cast<std::size_t>(dim);
    const std::vector<float> q = test::gaussian(size, seed + 3), k = test::gaussian(size, seed + 4);
    std::vector<float> q_rotated(size), k_rotated(size);
    rotate_row(plan, 0, q, q_rotated);
    rotate_row(plan, 0, k, k_rotated);
    RC_ASSERT(std::abs(dot(q_rotated, k_rotated) - dot(q, k)) < 1e-5 * (1.0 + std::sqrt(dot(q, q) * dot(k, k))));
    RC_ASSERT(std::abs(dot(q_rotated, q_rotated) - dot(q, q)) < 1e-5 * (1.0 + dot(q, q)));
  });
}

TEST_CASE("A common shift of all keys is free: the center cancels in the softmax", "[codec][property]") {
  rc::prop("attention with shifted keys", [] {
    const std::uint64_t seed = *rc::gen::inRange<std::uint64_t>(0, 1000);
    const int tokens = *rc::gen::inRange(1, 30), window = *rc::gen::inRange(0, 8);
    constexpr int kDim = 6;
    const auto rows = static_cast<std::size_t>(tokens * kDim);
    const std::vector<float> q = test::gaussian(rows, seed), k = test::gaussian(rows, seed + 1),
                             v = test::gaussian(rows, seed + 2), center = test::gaussian(kDim, seed + 3);
    std::vector<float> shifted = k;
    for (std::size_t i = 0; i < rows; ++i) shifted[i] += center[i % kDim];
    std::vector<double> out(rows), out_shifted(rows);
    attend(q, k, v, kDim, kDim, 0.4, window, out);
    attend(q, shifted, v, kDim, kDim, 0.4, window, out_shifted);
    RC_ASSERT(test::largest_difference(out, out_shifted) < 1e-5);
  });
}

TEST_CASE("Every composition of any orthogonal basis is orthogonal", "[solve][property]") {
  rc::prop("any dimension", [] {
    const int dim = *rc::gen::inRange(1, 70);
    const std::vector<double> basis = test::random_orthogonal(dim, *rc::gen::inRange<std::uint64_t>(0, 1000));
    for (const Composition& composition : compositions())
      if (!composition.uses('J'))
        RC_ASSERT(test::orthogonality_defect(compose(composition, basis, dim, hadamard_order(dim)), dim) < 1e-11);
  });
}
