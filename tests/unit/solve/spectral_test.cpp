#include <kvq/compute/eigh.h>
#include <kvq/plan/rotation.h>
#include <kvq/solve/spectral.h>
#include <kvq/solve/structured.h>

#include "support/compare.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <set>
#include <sstream>

using namespace kvq;

namespace {

/// P of OSCAR A.4: column place[k] selects the k-th channel.
std::vector<double> permutation(int dim) {
  const std::vector<int> places = bit_reversal_places(dim);
  std::vector<double> p(static_cast<std::size_t>(dim * dim), 0.0);
  for (int k = 0; k < dim; ++k) p[static_cast<std::size_t>(k * dim + places[static_cast<std::size_t>(k)])] = 1.0;
  return p;
}

/// The factors of a recipe, multiplied from left to right.
std::vector<double> product_of(const std::string& recipe, const std::vector<double>& basis, int dim, int order) {
  std::vector<double> r = test::identity(dim);
  std::istringstream factors(recipe);
  for (std::string factor; std::getline(factors, factor, '*');) {
    if (factor == "U")
      r = test::multiply(r, basis, dim);
    else if (factor == "H")
      r = test::multiply(r, test::sylvester_blocks(dim, order), dim);
    else if (factor == "P")
      r = test::multiply(r, permutation(dim), dim);
    else
      REQUIRE(factor == "I");
  }
  return r;
}

/// False for the residual variants, which are built from the coder's error.
bool is_product(const Composition& composition) { return !composition.uses('J'); }

double surrogate(const std::vector<double>& c, const std::vector<double>& e, const std::vector<double>& r, int dim) {
  return test::trace(test::multiply(test::conjugate(c, r, dim), e, dim), dim);
}

}  // namespace

TEST_CASE("The default composition is OSCAR's Eq. 3, and names are unique", "[solve]") {
  REQUIRE(!compositions().empty());
  CHECK(compositions().front().name == "uhp");
  CHECK(compositions().front().recipe == "U*H*P");
  std::set<std::string> names;
  for (const Composition& each : compositions()) {
    CHECK(find_composition(each.name) == &each);
    CHECK(names.insert(each.name).second);
    if (each.official.empty()) continue;
    CHECK(find_composition(each.official) == &each);
  }
  CHECK(names.contains("residual"));
  CHECK(find_composition("huu") == nullptr);
  CHECK(find_composition("") == nullptr);
  CHECK(compositions().front().uses('P'));
  CHECK_FALSE(compositions().front().uses('J'));
}

TEST_CASE("Every composition is orthogonal and the product of its recipe", "[solve]") {
  for (const int dim : {64, 80, 96, 128}) {
    const std::vector<double> basis = test::random_orthogonal(dim, 3);
    for (const Composition& each : compositions()) {
      if (!is_product(each)) continue;
      INFO(each.recipe << ", dim " << dim);
      const std::vector<double> r = compose(each, basis, dim, hadamard_order(dim));
      CHECK(test::orthogonality_defect(r, dim) < 1e-12);
      CHECK(test::largest_difference(r, product_of(each.recipe, basis, dim, hadamard_order(dim))) < 1e-13);
    }
  }
}

TEST_CASE("The permutation puts the k-th column where bit reversal says", "[solve]") {
  const std::vector<double> basis = test::random_orthogonal(128, 5);
  const std::vector<double> uh = compose(*find_composition("uh"), basis, 128, 128),
                            uhp = compose(*find_composition("uhp"), basis, 128, 128);
  const int places[] = {0, 64, 32, 96, 16, 80, 48, 112};
  for (std::size_t k = 0; k < 8; ++k)
    for (std::size_t i = 0; i < 128; ++i) CHECK(uhp[i * 128 + static_cast<std::size_t>(places[k])] == uh[i * 128 + k]);
}

TEST_CASE("Lemma 1: the Hadamard after the eigenbasis equalizes the diagonal within every block", "[solve]") {
  for (const int dim : {64, 80, 96, 128}) {
    const int order = hadamard_order(dim);
    const std::vector<double> c = test::random_covariance(dim, 9, 0.8);
    const std::vector<double> rotated =
        test::conjugate(c, compose(*find_composition("uh"), eigh(c, dim).vectors, dim, order), dim);
    for (int block = 0; block < dim; block += order) {
      double mean = 0.0;
      for (int i = block; i < block + order; ++i) mean += rotated[static_cast<std::size_t>(i * (dim + 1))] / order;
      for (int i = block; i < block + order; ++i)
        if (std::abs(rotated[static_cast<std::size_t>(i * (dim + 1))] - mean) > 1e-12)
          FAIL("dim " << dim << ", channel " << i);
    }
    if (order == dim) CHECK(rotated[0] == Approx(test::trace(c, dim) / dim).epsilon(1e-12));
  }
}

TEST_CASE("Sign candidates turn columns around; candidate 0 is the canonical basis", "[solve]") {
  const std::vector<double> basis = test::random_orthogonal(16, 1);
  CHECK(with_signs(basis, 16, 7, 1, 2, 0) == basis);
  std::set<std::vector<double>> seen;
  double kept = 0.0;
  for (int candidate = 1; candidate <= 40; ++candidate) {
    const std::vector<double> turned = with_signs(basis, 16, 7, 1, 2, candidate);
    for (std::size_t j = 0; j < 16; ++j) {
      const double sign = turned[j] / basis[j];
      REQUIRE(std::abs(sign) == 1.0);
      kept += sign > 0 ? 1 : 0;
      for (std::size_t i = 0; i < 16; ++i) REQUIRE(turned[i * 16 + j] == sign * basis[i * 16 + j]);
    }
    seen.insert(turned);
  }
  CHECK(seen.size() == 40);
  CHECK(std::abs(kept - 320) < 5 * std::sqrt(640 * 0.25));
  CHECK(with_signs(basis, 16, 7, 1, 2, 3) == with_signs(basis, 16, 7, 1, 2, 3));
  for (const auto& other :
       {with_signs(basis, 16, 8, 1, 2, 3), with_signs(basis, 16, 7, 2, 2, 3), with_signs(basis, 16, 7, 1, 3, 3)})
    CHECK(other != with_signs(basis, 16, 7, 1, 2, 3));
}

TEST_CASE("The residual rotation minimizes the frozen-error surrogate; the published one is its transpose", "[solve]") {
  for (const int dim : {8, 64, 80}) {
    INFO("dim " << dim);
    const std::vector<double> c = test::random_covariance(dim, 1, 0.8), e = test::random_covariance(dim, 2, 0.7);
    const EigenPairs target = eigh(c, dim), error = eigh(e, dim);
    const std::vector<double> best = residual_rotation(target, error, dim, false),
                              published = residual_rotation(target, error, dim, true);
    CHECK(test::orthogonality_defect(best, dim) < 1e-12);
    CHECK(test::largest_difference(published, test::transpose(best, dim)) < 1e-14);

    // The minimum over all rotations: the largest eigenvalues meet the smallest.
    double least = 0.0;
    for (std::size_t k = 0; k < target.values.size(); ++k)
      least += target.values[k] * error.values[target.values.size() - 1 - k];
    CHECK(surrogate(c, e, best, dim) == Approx(least).epsilon(1e-9));
    for (std::uint64_t seed = 10; seed < 30; ++seed)
      CHECK(surrogate(c, e, test::random_orthogonal(dim, seed), dim) > least);
    CHECK(surrogate(c, e, published, dim) > least);
  }
}
