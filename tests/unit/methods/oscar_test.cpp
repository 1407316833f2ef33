#include <kvq/methods/method.h>
#include <kvq/methods/option_table.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/plan/rotation.h>
#include <kvq/solve/spectral.h>
#include <kvq/stats/collect.h>

#include "support/compare.h"
#include "support/decide.h"
#include "support/error_of.h"
#include "support/matrix.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>

using namespace kvq;
using test::LayerSpec;

namespace {

std::vector<double> block(const std::vector<float>& all, std::size_t head, std::size_t size) {
  return test::widened(std::span(all).subspan(head * size, size));
}

/// Checks that eigenbasis and spectrum solve the eigenproblem of the target, and that the matrix is the recipe's
/// product with this basis.
void check_explained(const TensorPlan& plan, const std::vector<MomentSum>& target, const Composition& composition,
                     int dim) {
  const auto d = static_cast<std::size_t>(dim);
  for (std::size_t head = 0; head < target.size(); ++head) {
    INFO("head " << head);
    const std::vector<double> basis = block(plan.rotation.eigenbasis, head, d * d),
                              spectrum = block(plan.rotation.spectrum, head, d);
    CHECK(std::is_sorted(spectrum.rbegin(), spectrum.rend()));
    std::vector<double> diagonal(d * d, 0.0);
    for (std::size_t i = 0; i < d; ++i) diagonal[i * (d + 1)] = spectrum[i];
    CHECK(test::orthogonality_defect(basis, dim) < 1e-5);
    const std::vector<double> mean = mean_moment(target[head]);
    CHECK(test::largest_difference(test::conjugate(mean, basis, dim), diagonal) < 1e-5 * spectrum[0]);
    if (!composition.uses('J'))
      CHECK(test::largest_difference(block(plan.rotation.matrix, head, d * d),
                                     compose(composition, basis, dim, hadamard_order(dim))) < 1e-6);
  }
}

}  // namespace

TEST_CASE("Eigenbasis and spectrum of an OSCAR plan explain its rotation", "[methods]") {
  for (const auto& [dim, v_dim] : {std::pair{64, 48}, {96, 80}, {128, 64}}) {
    const LayerActivations layer =
        test::make_layer({.head_dim = dim, .v_head_dim = v_dim, .lengths = {90, 61}, .outliers = true});
    for (const int search : {0, 3}) {
      INFO("head_dim " << dim << ", sign search " << search);
      const Options options = test::options_of("oscar", [&](Options& o) { o.sign_search = search; });
      const LayerStats stats = test::stats_for(layer, options);
      const LayerPlan plan = test::decide_one(layer, options);
      const Composition& uhp = *find_composition("uhp");
      CHECK(plan.k.rotation.recipe == "U*H*P");
      CHECK(plan.k.rotation.target == "query");
      CHECK(plan.v->rotation.target == "scored_value");
      CHECK(plan.k.rotation.order == hadamard_order(dim));
      check_explained(plan.k, stats.moment(Moment::query), uhp, dim);
      check_explained(*plan.v, stats.moment(Moment::scored_value), uhp, v_dim);
    }
  }
}

TEST_CASE("Without a sign search the stored eigenvectors have canonical signs", "[methods]") {
  const LayerPlan plan = test::decide_one(test::make_layer({.head_dim = 64, .v_head_dim = 64, .lengths = {151}}),
                                          test::options_of("oscar"));
  CHECK(plan.k.rotation.sign_choice == std::vector<std::string>{"canonical", "canonical"});
  for (const std::vector<float>* basis : {&plan.k.rotation.eigenbasis, &plan.v->rotation.eigenbasis})
    for (std::size_t column = 0; column < 64; ++column) {
      float peak = 0.0f;
      for (std::size_t i = 0; i < 64; ++i)
        if (std::abs((*basis)[i * 64 + column]) > std::abs(peak)) peak = (*basis)[i * 64 + column];
      CHECK(peak > 0.0f);
    }
}

TEST_CASE("Every composition gives a plan that says how it was made", "[methods]") {
  const LayerActivations layer =
      test::make_layer({.head_dim = 48, .v_head_dim = 32, .lengths = {151}, .outliers = true});
  for (const Composition& composition : compositions()) {
    INFO(composition.name);
    const Options options = test::options_of("oscar", [&](Options& o) { o.composition = composition.id; });
    const LayerPlan plan = test::decide_one(layer, options);
    CHECK(plan.k.rotation.recipe == composition.recipe);
    CHECK(orthogonality_error(plan.k.rotation, 48) < 1e-6);
    CHECK(plan.k.rotation.eigenbasis.empty() == !composition.uses('U'));
    if (composition.uses('U'))
      check_explained(plan.k, test::stats_for(layer, options).moment(Moment::query), composition, 48);
    CHECK(plan.k.error->after ==
          Approx(test::measured_error(test::stats_for(layer, options), plan.k, Side::k)).epsilon(0.02));
  }
  GivenOptions unknown;
  unknown.put("--composition", "none");
  CHECK(test::error_of([&] { resolve_options(find_method("oscar"), unknown); })->kind() == ErrorKind::usage);
}

TEST_CASE("Every target gives the eigenbasis of its moment", "[methods]") {
  const LayerActivations layer = test::make_layer({.head_dim = 32, .v_head_dim = 24, .lengths = {90, 61}});
  for (const Moment key_target : {Moment::query, Moment::key, Moment::scored_query})
    for (const Moment value_target : {Moment::scored_value, Moment::value, Moment::sst}) {
      INFO(to_string(key_target) << " and " << to_string(value_target));
      const Options options = test::options_of("oscar", [&](Options& o) {
        o.k.target = key_target;
        o.v.target = value_target;
      });
      const LayerStats stats = test::stats_for(layer, options);
      const LayerPlan plan = test::decide_one(layer, options);
      CHECK(plan.k.rotation.target == to_string(key_target));
      CHECK(plan.v->rotation.target == to_string(value_target));
      check_explained(plan.k, stats.moment(key_target), *find_composition("uhp"), 32);
      check_explained(*plan.v, stats.moment(value_target), *find_composition("uhp"), 24);
    }
}

TEST_CASE("A shared rotation diagonalizes the mean of the heads' moments", "[methods]") {
  const LayerActivations layer = test::make_layer({.head_dim = 32, .v_head_dim = 24, .lengths = {151}});
  const Options options = test::options_of("oscar", [](Options& o) { o.scope = Scope::layer; });
  const LayerPlan plan = test::decide_one(layer, options);
  const LayerStats stats = test::stats_for(layer, options);
  MomentSum both = stats.moment(Moment::query)[0];  // equal weights, so the mean of the means is the mean of the sum
  both.add(stats.moment(Moment::query)[1]);
  check_explained(plan.k, {both}, *find_composition("uhp"), 32);
}

TEST_CASE("On rows with outliers OSCAR's rotation lowers the error of both sides", "[methods]") {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    INFO("seed " << seed);
    const LayerActivations layer = test::make_layer(
        {.head_dim = 64, .v_head_dim = 64, .lengths = {90, 61}, .softmax_scale = 0.01, .seed = seed, .outliers = true});
    const LayerPlan plan = test::decide_one(layer, test::options_of("oscar"));
    CHECK(plan.k.error->metric == "query_weighted");
    CHECK(plan.v->error->metric == "attention_weighted");
    CHECK(plan.k.error->after <= plan.k.error->before);
    CHECK(plan.v->error->after <= plan.v->error->before);
  }
}

TEST_CASE("A sign search is never worse than the canonical signs, and more candidates never worse than fewer",
          "[methods]") {
  int changed = 0;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    const LayerActivations layer =
        test::make_layer({.head_dim = 64, .v_head_dim = 32, .lengths = {90}, .seed = seed, .outliers = true});
    const auto plan_with = [&](int candidates) {
      return test::decide_one(layer, test::options_of("oscar", [&](Options& o) {
                                o.k.clip = o.v.clip = 1.0;
                                o.sign_search = candidates;
                              }));
    };
    const LayerPlan none = plan_with(0), few = plan_with(3), many = plan_with(9);
    INFO("seed " << seed);
    CHECK(few.k.error->after <= none.k.error->after);
    CHECK(many.k.error->after <= few.k.error->after);
    CHECK(few.v->error->after <= none.v->error->after);
    CHECK(many.v->error->after <= few.v->error->after);
    for (const std::string& choice : many.k.rotation.sign_choice) {
      CHECK((choice == "canonical" || (choice.starts_with("random ") && choice.ends_with(" of 9"))));
      changed += choice != "canonical" ? 1 : 0;
    }
  }
  CHECK(changed > 0);
}

TEST_CASE("A searched clip is on the grid", "[methods]") {
  const LayerActivations layer = test::make_layer({.head_dim = 64, .v_head_dim = 64, .lengths = {90}, .seed = 6});
  const LayerPlan searched = test::decide_one(layer, test::options_of("oscar"));
  for (const double ratio : {searched.k.clip_ratio.at(0), searched.k.clip_ratio.at(1), searched.v->clip_ratio.at(0),
                             searched.v->clip_ratio.at(1)}) {
    CHECK(ratio >= 0.85);
    CHECK(ratio <= 1.0);
    CHECK(std::abs(ratio * 100 - std::round(ratio * 100)) < 1e-9);
  }
}

TEST_CASE("OSCAR's defaults are the paper's", "[methods]") {
  const Options options = test::options_of("oscar");
  CHECK(options.composition == CompositionId::uhp);
  CHECK(options.k.bits == 2);
  CHECK(options.v.bits == 2);
  CHECK(options.k.target == Moment::query);
  CHECK(options.v.target == Moment::scored_value);
  const LayerPlan plan =
      test::decide_one(test::make_layer({.head_dim = 128, .v_head_dim = 96, .lengths = {61}}), options);
  CHECK(std::get<UniformCoder>(plan.k.coder) == UniformCoder{.bits = 2, .group_size = 64});
  CHECK(std::get<UniformCoder>(plan.v->coder).group_size == 96);  // 64 does not divide
}

TEST_CASE("The rotation report has the five rows of every head", "[methods]") {
  const LayerActivations layer =
      test::make_layer({.layer = 3, .head_dim = 64, .v_head_dim = 32, .lengths = {90}, .outliers = true});
  const LayerStats stats = collect(layer, {.moments = {Moment::query, Moment::key}, .sample_tokens = 50});
  const LayerRotationReport report = report_rotations(stats, Scope::kv_head, 16);
  CHECK(report.layer == 3);
  REQUIRE(report.heads.size() == 2);
  for (const auto& head : report.heads) {
    CHECK(head.k.size() == 5);
    CHECK(head.k[3].importance_peak == Approx(1.0).epsilon(1e-5));
    CHECK(head.k[1].largest < head.k[0].largest);  // the Hadamard spreads outliers
    CHECK(head.alignment >= 0.0);
    CHECK(head.alignment <= 1.0);
  }
}

TEST_CASE("The rotation report of a shared rotation has one C_Q for all heads", "[methods]") {
  const LayerActivations layer =
      test::make_layer({.layer = 3, .head_dim = 64, .v_head_dim = 32, .lengths = {90}, .outliers = true});
  const LayerStats stats = collect(layer, {.moments = {Moment::query, Moment::key}, .sample_tokens = 50});
  const LayerRotationReport shared = report_rotations(stats, Scope::layer, 16);
  const LayerRotationReport own = report_rotations(stats, Scope::kv_head, 16);
  REQUIRE(shared.heads.size() == 2);
  CHECK(shared.heads[0].alignment == shared.heads[1].alignment);
  CHECK(own.heads[0].alignment != own.heads[1].alignment);
  for (const auto& head : shared.heads) CHECK(head.k[3].importance_peak == Approx(1.0).epsilon(1e-5));
  CHECK(shared.heads[0].k[2].importance_peak == shared.heads[1].k[2].importance_peak);
  CHECK(own.heads[0].k[2].importance_peak != own.heads[1].k[2].importance_peak);
}
