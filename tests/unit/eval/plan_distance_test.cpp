#include <kvq/eval/plan_distance.h>

#include <kvq/solve/structured.h>

#include "support/artifacts.h"
#include "support/featured_artifact.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <numeric>
#include <string>

using namespace kvq;
using test::conjugate;
using test::multiply;
using test::transpose;

namespace {

constexpr int kDim = 16, kHeads = 2;
constexpr auto kSize = static_cast<std::size_t>(kDim);
using Matrix = std::vector<double>;  ///< [kDim, kDim], row-major
using Spectrum = std::vector<double>;

constexpr double kFloat = 2e-6;    ///< rounding of float matrices, for a distance of 0
constexpr double kDegrees = 1e-3;  ///< rounding of float matrices, for an angle

double& at(Matrix& a, std::size_t row, std::size_t column) { return a[row * kSize + column]; }
double at(const Matrix& a, std::size_t row, std::size_t column) { return a[row * kSize + column]; }

Matrix diagonal(const Spectrum& numbers) {
  Matrix result(kSize * kSize, 0.0);
  for (std::size_t i = 0; i < kSize; ++i) at(result, i, i) = numbers[i];
  return result;
}
Matrix hadamard() { return test::sylvester_blocks(kDim, kDim); }
Matrix reversal() {
  Matrix result(kSize * kSize, 0.0);
  const std::vector<int> places = bit_reversal_places(kDim);
  for (std::size_t i = 0; i < kSize; ++i) at(result, i, static_cast<std::size_t>(places[i])) = 1.0;
  return result;
}
Matrix product(const Matrix& a, const Matrix& b) { return multiply(a, b, kDim); }

/// Rotates columns i and j of a basis by an angle in degrees.
void turn(Matrix& basis, std::size_t i, std::size_t j, double degrees) {
  const double c = std::cos(degrees * std::numbers::pi / 180.0), s = std::sin(degrees * std::numbers::pi / 180.0);
  for (std::size_t row = 0; row < kSize; ++row) {
    const double x = at(basis, row, i), y = at(basis, row, j);
    at(basis, row, i) = c * x + s * y;
    at(basis, row, j) = c * y - s * x;
  }
}

/// Block-diagonal matrix of random orthogonal blocks; blocks end at `borders`.
Matrix random_blocks(const std::vector<std::size_t>& borders, std::uint64_t seed) {
  Matrix result(kSize * kSize, 0.0);
  std::size_t first = 0;
  for (const std::size_t end : borders) {
    const std::size_t size = end - first;
    const auto block = test::random_orthogonal(static_cast<int>(size), seed + 17 * end);
    for (std::size_t i = 0; i < size; ++i)
      for (std::size_t j = 0; j < size; ++j) at(result, first + i, first + j) = block[i * size + j];
    first = end;
  }
  return result;
}

/// One head: eigenbasis, spectrum and rotation R.
struct Head {
  Matrix basis;
  Spectrum spectrum;
  Matrix rotation;
};
using HeadList = std::vector<Head>;

Spectrum falling(double decay) {
  Spectrum spectrum;
  for (int i = 0; i < kDim; ++i) spectrum.push_back(10.0 * std::pow(decay, i));
  return spectrum;
}

void append(std::vector<float>& numbers, const std::vector<double>& more) {
  for (const double x : more) numbers.push_back(static_cast<float>(x));
}

TensorPlan plan_of(const HeadList& heads, const std::string& recipe) {
  TensorPlan plan;
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.scope = heads.size() == 1 ? Scope::layer : Scope::kv_head;
  plan.rotation.recipe = recipe;
  plan.rotation.target = "query";
  for (const Head& head : heads) {
    append(plan.rotation.eigenbasis, head.basis);
    append(plan.rotation.spectrum, head.spectrum);
    append(plan.rotation.matrix, head.rotation);
  }
  plan.coder = UniformCoder{.bits = 2, .group_size = kDim};
  plan.clip_ratio.assign(heads.size(), 0.96);
  return plan;
}

/// Makes R from U and the fixed factors H and P.
using Recipe = std::function<Matrix(const Matrix& basis)>;
const std::vector<std::pair<std::string, Recipe>>& recipes() {
  static const std::vector<std::pair<std::string, Recipe>> all = {
      {"U", [](const Matrix& u) { return u; }},
      {"U*H", [](const Matrix& u) { return product(u, hadamard()); }},
      {"U*P", [](const Matrix& u) { return product(u, reversal()); }},
      {"U*H*P", [](const Matrix& u) { return product(product(u, hadamard()), reversal()); }},
      {"H*U", [](const Matrix& u) { return product(hadamard(), u); }},
      {"H*U*P", [](const Matrix& u) { return product(product(hadamard(), u), reversal()); }},
  };
  return all;
}
Matrix uh(const Matrix& u) { return product(u, hadamard()); }

HeadList random_heads(const Recipe& recipe, const Spectrum& spectrum, std::uint64_t seed = 1) {
  HeadList heads;
  for (int h = 0; h < kHeads; ++h) {
    const Matrix basis = test::random_orthogonal(kDim, seed * 100 + static_cast<std::uint64_t>(h));
    heads.push_back({basis, spectrum, recipe(basis)});
  }
  return heads;
}

PlanDistance compared(const TensorPlan& plan, const TensorPlan& reference) {
  return plan_distance(plan, reference, kHeads, kDim);
}
PlanDistance compared(const HeadList& heads, const HeadList& reference, const std::string& recipe = "U*H") {
  return compared(plan_of(heads, recipe), plan_of(reference, recipe));
}

Matrix covariance(const Head& head) {
  return product(product(head.basis, diagonal(head.spectrum)), transpose(head.basis, kDim));
}

double norm(const std::vector<double>& numbers) {
  return std::sqrt(std::inner_product(numbers.begin(), numbers.end(), numbers.begin(), 0.0));
}
std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

/// Second implementation of the header's definitions; the largest over all heads.
double covariance_distance(const HeadList& heads, const HeadList& reference) {
  double largest = 0.0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const Matrix c = covariance(reference[h]);
    largest = std::max(largest, norm(minus(covariance(heads[h]), c)) / norm(c));
  }
  return largest;
}
double importance_distance(const HeadList& heads, const HeadList& reference) {
  double largest = 0.0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const Matrix c = covariance(reference[h]);
    const Matrix own = conjugate(c, heads[h].rotation, kDim), other = conjugate(c, reference[h].rotation, kDim);
    double sum = 0.0;
    for (std::size_t j = 0; j < kSize; ++j) sum += std::abs(at(own, j, j) - at(other, j, j));
    largest = std::max(largest, sum / test::trace(c, kDim));
  }
  return largest;
}

/// The fields of a distance by name, without `orthogonality`, which depends on one plan alone.
std::vector<std::pair<std::string, std::optional<double>>> fields(const PlanDistance& d) {
  return {{"covariance", d.covariance},
          {"angle", d.angle},
          {"factor", d.factor},
          {"importance", d.importance},
          {"center", d.center},
          {"clip", d.clip},
          {"codebook", d.codebook},
          {"trellis", d.trellis},
          {"centroids", d.centroids},
          {"gauge", d.gauge},
          {"channel_scale", d.channel_scale},
          {"outlier_gain", d.outlier_gain}};
}

/// Names of the fields that have a value.
std::vector<std::string> present(const PlanDistance& d) {
  std::vector<std::string> names;
  for (const auto& [name, value] : fields(d))
    if (value) names.push_back(name);
  return names;
}

/// Checks that all fields are exactly 0. Angles come from a singular value, so they get the tolerance of float bases.
void check_zero(const PlanDistance& d) {
  for (const auto& [name, value] : fields(d)) {
    CAPTURE(name);
    if (value && name == "angle")
      CHECK(*value < kDegrees);
    else if (value)
      CHECK(*value == 0.0);
  }
}

void check_same_rotation(const PlanDistance& d) {
  REQUIRE((d.covariance && d.angle && d.factor && d.importance));
  CHECK(*d.covariance < kFloat);
  CHECK(*d.angle < kDegrees);
  CHECK(*d.factor < kFloat);
  CHECK(*d.importance < kFloat);
}

/// A random channel order of a head with mixed widths: place p of a row holds source channel order[p].
std::vector<int> shuffled(std::uint64_t seed) {
  std::vector<int> order(kSize);
  std::iota(order.begin(), order.end(), 0);
  test::Random random(seed);
  for (int i = kDim - 1; i > 0; --i)
    std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(random.integer(0, i))]);
  return order;
}
Matrix gather(const std::vector<int>& order) {
  Matrix result(kSize * kSize, 0.0);
  for (std::size_t place = 0; place < kSize; ++place) at(result, static_cast<std::size_t>(order[place]), place) = 1.0;
  return result;
}

const std::vector<std::size_t> kGroups = {2, 7, 16};  ///< ends of the groups of one width
const std::vector<std::uint8_t> kWidths = {4, 4, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2};

/// A plan of mixed widths whose rotations inside groups come from `seed`. With `basis_seed`, channels are those of an
/// eigenbasis.
struct Mixed {
  std::uint64_t seed = 1, order_seed = 5, basis_seed = 0;
  bool turned = false;       ///< R is stored transposed
  bool other_order = false;  ///< the order of R differs from the order of the plan
};
TensorPlan mixed_plan(const Mixed& mixed) {
  TensorPlan plan;
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.recipe = mixed.basis_seed ? "U*G*Haar" : "G*Haar";
  plan.allocation = BitAllocation{.unit = mixed.basis_seed ? "channel" : "rope_block", .score = "qk_avg"};
  for (std::uint64_t h = 0; h < kHeads; ++h) {
    const std::vector<int> order = shuffled(mixed.order_seed + 10 * h);
    Matrix r = product(gather(mixed.other_order ? shuffled(mixed.order_seed + 10 * h + 1) : order),
                       random_blocks(kGroups, mixed.seed + 1000 * h));
    if (mixed.basis_seed) {
      const Matrix basis = test::random_orthogonal(kDim, mixed.basis_seed + h);
      r = product(basis, r);
      plan.rotation.target = "query";
      append(plan.rotation.eigenbasis, basis);
      append(plan.rotation.spectrum, falling(0.8));
    }
    append(plan.rotation.matrix, mixed.turned ? transpose(r, kDim) : r);
    for (std::size_t place = 0; place < kSize; ++place) {
      plan.allocation->channel_bits.push_back(kWidths[place]);
      plan.allocation->channel_order.push_back(static_cast<std::uint16_t>(order[place]));
    }
  }
  plan.coder = UniformCoder{.bits = 4, .group_size = 0, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  return plan;
}

TensorPlan identity_plan() {
  TensorPlan plan;
  plan.coder = UniformCoder{.bits = 2, .group_size = kDim, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  return plan;
}

TensorPlan with_tables(std::map<int, std::vector<float>> tables, bool per_head = false) {
  TensorPlan plan = identity_plan();
  plan.coder =
      CodebookCoder{.bits = 2, .group_size = kDim, .per_head = per_head, .fitted = true, .tables = std::move(tables)};
  return plan;
}

TensorPlan with_taps(std::vector<TrellisTaps> taps) {
  TensorPlan plan = identity_plan();
  plan.coder = TrellisCoder{.bits = 2, .group_size = kDim, .taps = std::move(taps)};
  return plan;
}

/// 4 centroids for each head, far apart: pairwise distances of 10 and more.
TensorPlan with_centroids(bool joint, std::uint64_t seed = 3) {
  TensorPlan plan = identity_plan();
  plan.centroids = Centroids{.count = 4, .joint = joint, .values = test::gaussian(kHeads * 4 * kSize, seed, 10.0)};
  return plan;
}

/// Row c of head h.
std::span<float> centroid(TensorPlan& plan, std::size_t h, std::size_t c) {
  return std::span(plan.centroids->values).subspan((h * 4 + c) * kSize, kSize);
}

/// Mean distance of rows from the mean of all rows.
double spread(const std::vector<std::vector<double>>& rows) {
  std::vector<double> mean(rows[0].size(), 0.0);
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) mean[i] += row[i] / static_cast<double>(rows.size());
  double sum = 0.0;
  for (const auto& row : rows) sum += norm(minus(row, mean));
  return sum / static_cast<double>(rows.size());
}
std::vector<std::vector<double>> rows_of(TensorPlan& plan, std::size_t h) {
  std::vector<std::vector<double>> rows;
  for (std::size_t c = 0; c < 4; ++c) rows.emplace_back(centroid(plan, h, c).begin(), centroid(plan, h, c).end());
  return rows;
}

/// A of each head is diag(scale) times `mixing`; the plan has A^-1, too.
TensorPlan transformed_plan(const std::vector<Spectrum>& scales, const std::vector<Matrix>& mixings) {
  TensorPlan plan = identity_plan();
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.scope = scales.size() == 1 ? Scope::layer : Scope::kv_head;
  plan.rotation.recipe = "B*G*Haar";
  plan.transform = MetricTransform{.kind = "balanced", .outlier_gain = {}, .condition = {}};
  for (std::size_t h = 0; h < scales.size(); ++h) {
    Spectrum inverse;
    for (const double x : scales[h]) inverse.push_back(1.0 / x);
    append(plan.rotation.matrix, product(diagonal(scales[h]), mixings[h]));
    append(plan.rotation.inverse, product(transpose(mixings[h], kDim), diagonal(inverse)));
    plan.transform->outlier_gain.push_back(2.0 + static_cast<double>(h));
    plan.transform->condition.push_back(1.0);
  }
  return plan;
}

const std::vector<Spectrum> kScales = {falling(0.9), falling(0.8)};
std::vector<Matrix> mixings(const std::vector<std::size_t>& borders, std::uint64_t seed) {
  return {random_blocks(borders, seed), random_blocks(borders, seed + 1000)};
}
TensorPlan with_widths(TensorPlan plan, const std::vector<std::uint8_t>& widths = kWidths) {
  plan.allocation = BitAllocation{.unit = "channel", .score = "eigenvalue"};
  for (std::size_t h = 0; h < kHeads; ++h)
    for (std::size_t j = 0; j < kSize; ++j) {
      plan.allocation->channel_bits.push_back(widths[j]);
      plan.allocation->channel_order.push_back(static_cast<std::uint16_t>(j));
    }
  plan.coder = UniformCoder{.bits = 4, .group_size = 0, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  return plan;
}

}  // namespace

TEST_CASE("Transforms: an orthogonal map inside one width is no distance, one across widths is",
          "[eval][plan_distance]") {
  const TensorPlan whole = transformed_plan(kScales, mixings({16}, 1)),
                   other = transformed_plan(kScales, mixings({16}, 2));
  CHECK(*compared(whole, whole).gauge < kFloat);
  CHECK(*compared(other, whole).gauge < kFloat);  // one width, so one group
  const TensorPlan groups = with_widths(transformed_plan(kScales, mixings(kGroups, 1)));
  CHECK(*compared(with_widths(transformed_plan(kScales, mixings(kGroups, 2))), groups).gauge < kFloat);
  CHECK(*compared(with_widths(transformed_plan(kScales, mixings({16}, 2))), groups).gauge > 0.3);
  CHECK(*compared(with_widths(transformed_plan(kScales, mixings({2, 8, 16}, 1))), groups).gauge >
        0.1);  // one channel across a border
  // If the widths of a head differ, its channels are compared as one block with one metric.
  std::vector<std::uint8_t> narrower = kWidths;
  narrower[6] = 2;
  CHECK(*compared(with_widths(transformed_plan(kScales, mixings({16}, 2)), narrower), groups).gauge < kFloat);
}

TEST_CASE("Transforms: groups with a scale of their own are blocks", "[eval][plan_distance]") {
  const auto grouped = [](std::uint64_t seed, const std::vector<std::size_t>& borders) {
    TensorPlan plan = transformed_plan(kScales, mixings(borders, seed));
    plan.coder = UniformCoder{.bits = 2, .group_size = 8, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
    return plan;
  };
  CHECK(*compared(grouped(2, {8, 16}), grouped(1, {8, 16})).gauge < kFloat);
  CHECK(*compared(grouped(2, {16}), grouped(1, {8, 16})).gauge > 0.3);
}

TEST_CASE("Transforms: another balance of one channel of one head is its square, however channels are mixed",
          "[eval][plan_distance]") {
  const Matrix plain = test::identity(kDim);
  for (const auto& mixing :
       {std::vector<Matrix>{plain, plain}, std::vector<Matrix>{hadamard(), hadamard()}, mixings({16}, 1)}) {
    const TensorPlan reference = transformed_plan(kScales, mixing);
    for (const double factor : {1.001, 1.1, 2.0}) {
      CAPTURE(factor);
      std::vector<Spectrum> scales = kScales;
      scales[1][3] *= factor;
      // T is diag(.., factor, ..) up to mixing. In the other direction T shrinks the channel, and T^-1 counts.
      const TensorPlan other = transformed_plan(scales, mixing);
      CHECK(*compared(reference, other).gauge == Approx(factor * factor - 1.0).epsilon(1e-3));
      CHECK(*compared(other, reference).gauge == Approx(factor * factor - 1.0).epsilon(1e-3));
    }
  }
}

TEST_CASE("Transforms beside orthogonal rotations and diagonal ones are compared by their matrices",
          "[eval][plan_distance]") {
  TensorPlan scaled = identity_plan();
  for (std::size_t i = 0; i < kHeads * kSize; ++i) scaled.rotation.channel_scale.push_back(i % 5 == 0 ? 4.0f : 1.0f);
  const PlanDistance beside_nothing = compared(identity_plan(), scaled);
  CHECK(*beside_nothing.gauge == Approx(15.0));
  CHECK_FALSE(beside_nothing.channel_scale);
  CHECK(*compared(scaled, identity_plan()).gauge == Approx(15.0));
  CHECK(*compared(scaled, scaled).gauge < 1e-12);
  // The same map as a dense matrix with another mixing.
  std::vector<Spectrum> scales(kHeads, Spectrum(kSize, 1.0));
  for (std::size_t i = 0; i < kHeads * kSize; ++i)
    if (i % 5 == 0) scales[i / kSize][i % kSize] = 4.0;
  CHECK(*compared(transformed_plan(scales, mixings({16}, 4)), scaled).gauge < kFloat);
  TensorPlan blocks = scaled;
  blocks.rotation.kind = RotationKind::block_hadamard;
  blocks.rotation.order = 4;
  CHECK(*compared(blocks, scaled).gauge < kFloat);
  TensorPlan doubled = scaled;
  doubled.rotation.channel_scale[20] *= 8.0f;
  CHECK(*compared(doubled, scaled).channel_scale == 3.0);
  CHECK(*compared(scaled, doubled).channel_scale == 3.0);
}

TEST_CASE("What is of orthogonal rotations alone is not asked of transforms", "[eval][plan_distance]") {
  const TensorPlan own = with_widths(transformed_plan(kScales, mixings(kGroups, 1))),
                   other = with_widths(transformed_plan(kScales, mixings(kGroups, 2)));
  const PlanDistance found = compared(own, other);
  CHECK(present(found) == std::vector<std::string>{"gauge", "outlier_gain"});
  CHECK(*found.orthogonality < 1e-6);  // |A^-1 A - I| over the condition
  CHECK(present(compared(own, mixed_plan({}))) == std::vector<std::string>{"gauge"});
  CHECK_FALSE(compared(mixed_plan({}), mixed_plan({.seed = 2})).gauge);
  TensorPlan spoiled = own;
  spoiled.rotation.inverse[kSize * kSize + 5] += 0.125f;
  CHECK(*compared(spoiled, other).orthogonality > 1e-3);
}

TEST_CASE("Outlier gains by their largest relative change", "[eval][plan_distance]") {
  const TensorPlan reference = transformed_plan(kScales, mixings({16}, 1));
  TensorPlan plan = reference;
  plan.transform->outlier_gain = {2.0, 4.5};
  CHECK(*compared(plan, reference).outlier_gain == Approx(0.5));
  CHECK(*compared(reference, plan).outlier_gain == Approx(1.0 / 3.0));
  const TensorPlan shared = transformed_plan({kScales[0]}, {mixings({16}, 1)[0]});
  CHECK(*compared(shared, reference).outlier_gain == Approx(1.0 / 3.0));
}

TEST_CASE("Equal plans are at no distance in anything that is there", "[eval][plan_distance]") {
  for (const Artifact& artifact : {test::example_artifact(), test::featured_artifact()})
    for (const LayerPlan& layer : artifact.layers) {
      CAPTURE(layer.layer);
      check_zero(plan_distance(layer.k, layer.k, layer.geometry.num_kv_heads, layer.geometry.head_dim));
      if (layer.v)
        check_zero(plan_distance(*layer.v, *layer.v, layer.geometry.num_kv_heads, layer.geometry.v_head_dim));
    }
  for (const auto& [name, recipe] : recipes()) {
    CAPTURE(name);
    TensorPlan plan = plan_of(random_heads(recipe, falling(0.7)), name);
    plan.center = test::gaussian(kHeads * kSize, 4);
    check_zero(compared(plan, plan));
    CHECK(present(compared(plan, plan)) ==
          std::vector<std::string>{"covariance", "angle", "factor", "importance", "center", "clip"});
  }
  for (const TensorPlan& plan : {mixed_plan({}), mixed_plan({.basis_seed = 9}), identity_plan(),
                                 with_tables({{2, {-1, 0, 1, 2}}}), with_centroids(true)})
    check_zero(compared(plan, plan));
}

TEST_CASE("Nothing by nothing is no distance: spectra and centers of zeros", "[eval][plan_distance]") {
  TensorPlan plan = plan_of(random_heads(uh, Spectrum(kSize, 0.0)), "U*H");
  plan.center.assign(kHeads * kSize, 0.0f);
  check_zero(compared(plan, plan));
  TensorPlan same = with_centroids(false);
  std::fill(same.centroids->values.begin(), same.centroids->values.end(), 1.0f);  // no spread
  check_zero(compared(same, same));
}

TEST_CASE("What a plan has not is not there", "[eval][plan_distance]") {
  using Names = std::vector<std::string>;
  CHECK(present(compared(identity_plan(), identity_plan())) == Names{});
  CHECK(present(compared(with_tables({{2, {-1, 0, 1, 2}}}), with_tables({{2, {-1, 0, 1, 2}}}))) == Names{"codebook"});
  const TensorPlan trellis = with_taps({{.bits = 2, .memory = 1, .theta = {1, 2, 3, 4}}});
  CHECK(present(compared(trellis, trellis)) == Names{"trellis"});
  CHECK(present(compared(with_centroids(false), with_centroids(false))) == Names{"centroids"});
  CHECK(present(compared(with_centroids(false), trellis)) == Names{});
  TensorPlan centered = identity_plan();
  centered.center = test::gaussian(kHeads * kSize, 4);
  CHECK(present(compared(centered, identity_plan())) == Names{});
  CHECK(present(compared(identity_plan(), centered)) == Names{});
  CHECK(present(compared(centered, centered)) == Names{"center"});
  TensorPlan exact = identity_plan();
  exact.coder = ExactCoder{};
  CHECK(present(compared(exact, centered)) == Names{});
  const TensorPlan dense = plan_of(random_heads(uh, falling(0.7)), "U*H");
  CHECK(present(compared(dense, identity_plan())) == Names{});
  CHECK(present(compared(identity_plan(), dense)) == Names{});
}

TEST_CASE("Rotations of other recipes have no factors in common", "[eval][plan_distance]") {
  const auto heads = random_heads(uh, falling(0.7));
  const PlanDistance found = compared(plan_of(heads, "U*H"), plan_of(heads, "U*H*P"));
  CHECK(!found.factor);
  CHECK((found.covariance && *found.covariance == 0.0));
  for (const std::string recipe : {"Haar", "S*H"}) {  // of other seeds
    CAPTURE(recipe);
    TensorPlan one = identity_plan(), two = identity_plan();
    for (TensorPlan* plan : {&one, &two}) {
      plan->rotation.kind = RotationKind::dense;
      plan->rotation.recipe = recipe;
      for (std::uint64_t h = 0; h < kHeads; ++h)
        append(plan->rotation.matrix, test::random_orthogonal(kDim, h + (plan == &one ? 0 : 50)));
    }
    const PlanDistance random = compared(one, two);
    CHECK(!random.factor);
    CHECK(!random.covariance);
    CHECK(!random.angle);
    CHECK(!random.importance);
  }
}

TEST_CASE("Signs of eigenvectors are no distance", "[eval][plan_distance]") {
  for (const auto& [name, recipe] : recipes())
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
      CAPTURE(name, seed);
      const auto heads = random_heads(recipe, falling(0.7), seed);
      auto flipped = heads, moved = heads;
      for (std::size_t h = 0; h < kHeads; ++h) {
        Spectrum signs;
        test::Random random(40 + h + seed);
        for (int i = 0; i < kDim; ++i) signs.push_back(random.integer(0, 1) == 0 ? 1.0 : -1.0);
        flipped[h].basis = product(heads[h].basis, diagonal(signs));
        flipped[h].rotation = recipe(flipped[h].basis);
        // The same flip in R: factors before U in the recipe stay in front.
        moved[h].basis = flipped[h].basis;
        if (name.front() == 'U')
          moved[h].rotation = product(product(flipped[h].basis, transpose(heads[h].basis, kDim)), heads[h].rotation);
        else
          moved[h].rotation = flipped[h].rotation;
      }
      check_same_rotation(compared(flipped, heads, name));
      check_same_rotation(compared(moved, heads, name));
      check_same_rotation(compared(heads, flipped, name));
    }
}

TEST_CASE("Signs that were searched are no distance: R = U S H beside the same U", "[eval][plan_distance]") {
  const auto heads = random_heads(uh, falling(0.7));
  auto searched = heads;
  const Spectrum signs = {1, -1, 1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1};
  for (Head& head : searched) head.rotation = product(product(head.basis, diagonal(signs)), hadamard());
  check_same_rotation(compared(searched, heads));
}

TEST_CASE("The basis inside an eigenspace is no distance", "[eval][plan_distance]") {
  const Spectrum spectrum = {9, 9, 9, 5, 5, 2, 1, 1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25};
  for (const auto& [name, recipe] : recipes()) {
    if (name.front() != 'U') continue;  // H comes before U: the product depends on the basis
    CAPTURE(name);
    const auto heads = random_heads(recipe, spectrum);
    auto turned = heads;
    for (std::size_t h = 0; h < kHeads; ++h) {
      turned[h].basis = product(heads[h].basis, random_blocks({3, 5, 6, 11, 13, 16}, 70 + h));
      turned[h].rotation = recipe(turned[h].basis);
    }
    check_same_rotation(compared(turned, heads, name));
  }
}

TEST_CASE("Covariances and what they do to channels are compared by their definitions", "[eval][plan_distance]") {
  const auto heads = random_heads(uh, falling(0.8), 1), others = random_heads(uh, falling(0.6), 2);
  const PlanDistance found = compared(heads, others), back = compared(others, heads);
  CHECK(*found.covariance == Approx(covariance_distance(heads, others)).epsilon(1e-5));
  CHECK(*back.covariance == Approx(covariance_distance(others, heads)).epsilon(1e-5));
  CHECK(*found.importance == Approx(importance_distance(heads, others)).epsilon(1e-4));
  CHECK(*back.importance == Approx(importance_distance(others, heads)).epsilon(1e-4));
  CHECK(*found.importance > 0.1);
  // If one head differs, the distance counts it.
  for (std::size_t h = 0; h < kHeads; ++h) {
    auto one = others;
    one[h] = heads[h];
    CHECK(*compared(one, others).covariance == Approx(covariance_distance(one, others)).epsilon(1e-5));
    CHECK(*compared(one, others).importance == Approx(importance_distance(one, others)).epsilon(1e-4));
  }
}

TEST_CASE("A spectrum of another size is a distance of covariances alone", "[eval][plan_distance]") {
  const auto heads = random_heads(uh, falling(0.7));
  auto doubled = heads;
  for (Head& head : doubled)
    for (double& value : head.spectrum) value *= 2.0;
  const PlanDistance up = compared(doubled, heads), down = compared(heads, doubled);
  CHECK(*up.covariance == Approx(1.0).epsilon(1e-6));
  CHECK(*down.covariance == Approx(0.5).epsilon(1e-6));
  for (const PlanDistance& found : {up, down})
    CHECK((*found.angle < kDegrees && *found.factor < kFloat && *found.importance < kFloat));
}

TEST_CASE("A transposed rotation shows in its factor", "[eval][plan_distance]") {
  for (const auto& [name, recipe] : recipes()) {
    CAPTURE(name);
    const auto heads = random_heads(recipe, falling(0.7));
    for (std::size_t h = 0; h < kHeads; ++h) {
      auto turned = heads;
      turned[h].rotation = transpose(heads[h].rotation, kDim);
      const PlanDistance found = compared(turned, heads, name);
      CHECK(*found.factor > 0.1);
      CHECK(*found.covariance == 0.0);
      CHECK(*found.angle < kDegrees);
    }
  }
}

TEST_CASE("A factor that is missing, or out of place, shows", "[eval][plan_distance]") {
  const Recipe uhp = recipes()[3].second;
  const auto heads = random_heads(uhp, falling(0.7));
  const auto replaced = [&](const std::function<Matrix(const Matrix&)>& make) {
    auto others = heads;
    for (Head& head : others) head.rotation = make(head.basis);
    return compared(others, heads, "U*H*P");
  };
  CHECK(*replaced([](const Matrix& u) { return u; }).factor > 0.1);
  CHECK(*replaced([](const Matrix& u) { return u; }).importance > 0.1);
  CHECK(*replaced([](const Matrix& u) { return product(u, test::sylvester_blocks(kDim, 4)); }).factor > 0.1);
  CHECK(*replaced([](const Matrix& u) { return product(u, reversal()); }).factor > 0.1);
  CHECK(*replaced([](const Matrix&) { return test::identity(kDim); }).factor > 0.1);
  CHECK(*replaced([](const Matrix&) { return product(hadamard(), reversal()); }).factor > 0.1);
  // All entries of a full Hadamard matrix have the same magnitude, so without signs the order of columns makes no
  // distance.
  CHECK(*replaced([](const Matrix& u) { return uh(u); }).factor < kFloat);
}

TEST_CASE("Heads that changed places show in the covariance, rotations that did show in the factor",
          "[eval][plan_distance]") {
  const auto heads = random_heads(uh, falling(0.7));
  const HeadList swapped = {heads[1], heads[0]};
  const PlanDistance all = compared(swapped, heads);
  CHECK(*all.covariance == Approx(covariance_distance(swapped, heads)).epsilon(1e-5));
  CHECK(*all.covariance > 0.5);
  CHECK(*all.angle > 30.0);
  CHECK(*all.importance > 0.1);
  CHECK(*all.factor < kFloat);
  auto rotations = heads;
  std::swap(rotations[0].rotation, rotations[1].rotation);
  const PlanDistance found = compared(rotations, heads);
  CHECK(*found.covariance == 0.0);
  CHECK(*found.angle < kDegrees);
  CHECK(*found.factor > 0.1);
}

TEST_CASE("Angles of eigenspaces in degrees", "[eval][plan_distance]") {
  const Spectrum spectrum = {50, 20, 20, 10, 10, 5, 5, 5, 2, 2, 2, 1, 1, 0.01, 0.005, 0.001};
  const auto heads = random_heads(uh, spectrum);
  const auto turned = [&](std::size_t head, std::size_t i, std::size_t j, double degrees) {
    auto others = heads;
    turn(others[head].basis, i, j, degrees);
    others[head].rotation = uh(others[head].basis);
    return *compared(others, heads).angle;
  };
  for (const double degrees : {0.1, 5.0, 30.0, 89.0}) {
    CAPTURE(degrees);
    CHECK(turned(0, 0, 3, degrees) == Approx(degrees).margin(kDegrees));
    CHECK(turned(1, 1, 8, degrees) == Approx(degrees).margin(kDegrees));
    CHECK(turned(1, 0, 15, degrees) == Approx(degrees).margin(kDegrees));  // from a large space into a small one
    CHECK(turned(0, 1, 2, degrees) < kDegrees);                            // inside one space
    CHECK(turned(0, 13, 15, degrees) < kDegrees);  // between spaces that hold less than 1% of the trace
  }
  CHECK(turned(0, 0, 3, 150.0) ==
        Approx(30.0).margin(kDegrees));  // 150 degrees count as 30, because eigenvectors have no sign
}

TEST_CASE("Neighbors less than 1% apart are one eigenspace", "[eval][plan_distance]") {
  Spectrum spectrum = falling(0.5);
  spectrum[1] = 0.995 * spectrum[0];
  const auto heads = random_heads(uh, spectrum);
  auto others = heads;
  turn(others[0].basis, 0, 1, 45.0);
  const PlanDistance close = compared(others, heads);
  CHECK(*close.angle < kDegrees);
  CHECK(*close.covariance == Approx(covariance_distance(others, heads)).epsilon(1e-3));
  auto apart = heads, apart_turned = others;
  for (auto* list : {&apart, &apart_turned})
    for (Head& head : *list) head.spectrum[1] = 0.98 * head.spectrum[0];
  CHECK(*compared(apart_turned, apart).angle == Approx(45.0).margin(kDegrees));
}

TEST_CASE("The largest principal angle of two spans", "[eval][plan_distance]") {
  for (const std::uint64_t seed : {0u, 1u, 2u}) {
    const Matrix frame = seed == 0 ? test::identity(kDim) : test::random_orthogonal(kDim, seed);
    CAPTURE(seed);
    for (const double degrees : {0.0, 1e-4, 1.0, 30.0, 60.0, 89.9, 90.0}) {
      CAPTURE(degrees);
      Matrix other = frame;
      turn(other, 1, 6, degrees);
      const auto angle = [&](std::size_t first, std::size_t end) {
        return principal_angle(frame, other, kDim, first, end);
      };
      CHECK(angle(1, 2) == Approx(degrees).margin(1e-5));
      CHECK(angle(0, 3) == Approx(degrees).margin(1e-5));
      CHECK(angle(5, 8) == Approx(degrees).margin(1e-5));
      CHECK(angle(1, 7) < 1e-5);   // both in the plane
      CHECK(angle(7, 16) < 1e-5);  // both outside the plane
      CHECK(angle(0, kSize) < 1e-5);
      CHECK(principal_angle(other, frame, kDim, 0, 3) == Approx(degrees).margin(1e-5));
    }
    Matrix two = frame;
    turn(two, 0, 8, 20.0);
    turn(two, 1, 9, 50.0);
    CHECK(principal_angle(frame, two, kDim, 0, 2) == Approx(50.0).margin(1e-6));
    CHECK(principal_angle(frame, two, kDim, 0, 1) == Approx(20.0).margin(1e-6));
    CHECK(principal_angle(frame, product(two, random_blocks({2, 16}, 8)), kDim, 0, 2) == Approx(50.0).margin(1e-6));
  }
}

TEST_CASE("Borders of eigenspaces", "[eval][plan_distance]") {
  using Places = std::vector<std::size_t>;
  const auto spaces = [](const std::vector<float>& spectrum, double gap = 0.01) { return eigenspaces(spectrum, gap); };
  CHECK(spaces({5.0f}) == Places{0, 1});
  CHECK(spaces({4.0f, 2.0f, 1.0f}) == Places{0, 1, 2, 3});
  CHECK(spaces({4.0f, 4.0f, 4.0f}) == Places{0, 3});
  CHECK(spaces({9.0f, 4.0f, 4.0f, 1.0f}) == Places{0, 1, 3, 4});
  CHECK(spaces({1000.0f, 995.0f, 990.1f, 985.2f, 500.0f}) ==
        Places{0, 4, 5});  // gaps between neighbors count, not the gap between the ends
  CHECK(spaces({1000.0f, 991.0f, 980.0f}) == Places{0, 2, 3});
  CHECK(spaces({4.0f, 3.0f, 2.9f}, 0.25) ==
        Places{0, 1, 3});  // a gap of exactly 25% of the larger eigenvalue separates
  CHECK(spaces({4.0f, 3.1f, 2.0f}, 0.25) == Places{0, 2, 3});
  CHECK(spaces({1.0f, 0.0f}) == Places{0, 1, 2});
}

TEST_CASE("Orthogonality is that of the first plan alone", "[eval][plan_distance]") {
  const auto heads = random_heads(uh, falling(0.7));
  TensorPlan sound = plan_of(heads, "U*H"), longer = sound;
  CHECK(*compared(sound, sound).orthogonality < kFloat);
  for (std::size_t i = 0; i < kSize * kSize; ++i) longer.rotation.matrix[kSize * kSize + i] *= 1.01f;  // of head 1
  CHECK(*compared(longer, sound).orthogonality == Approx(0.0201).epsilon(1e-3));
  CHECK(*compared(sound, longer).orthogonality < kFloat);
  CHECK(*compared(longer, sound).orthogonality == Approx(orthogonality_error(longer.rotation, kDim)).epsilon(1e-6));
}

namespace {

/// A plan that all heads of a layer share, and the same plan with a copy for each head.
struct Shared {
  HeadList heads = random_heads(uh, falling(0.7));
  TensorPlan layer = plan_of({heads[0]}, "U*H"), same = plan_of({heads[0], heads[0]}, "U*H");
  Shared() {
    layer.center = test::gaussian(kSize, 4);
    same.center = layer.center;
    same.center.insert(same.center.end(), layer.center.begin(), layer.center.end());
  }
};

}  // namespace

TEST_CASE("One rotation for the layer is that rotation for each head", "[eval][plan_distance]") {
  const Shared shared;
  check_zero(compared(shared.layer, shared.same));
  check_zero(compared(shared.same, shared.layer));
  check_zero(compared(shared.layer, shared.layer));
}

TEST_CASE("One rotation for the layer beside those of heads: every head counts, not the first alone",
          "[eval][plan_distance]") {
  const Shared shared;
  TensorPlan other = plan_of(shared.heads, "U*H");  // head 1 has another rotation than the layer
  other.center = shared.same.center;
  other.center[kSize] += 1.0f;
  other.clip_ratio[1] = 0.9;
  const double length = norm({shared.layer.center.begin(), shared.layer.center.end()});
  for (const TensorPlan* reference : {&shared.same, &shared.layer}) {
    CAPTURE(reference == &shared.layer);
    const PlanDistance found = compared(other, *reference);
    CHECK(*found.clip == Approx(0.06));
    CHECK(*found.covariance ==
          Approx(covariance_distance(shared.heads, {shared.heads[0], shared.heads[0]})).epsilon(1e-5));
    CHECK(*found.center == Approx(1.0 / length).epsilon(1e-6));
    CHECK(*compared(*reference, other).clip == Approx(0.06));
  }
}

TEST_CASE("Clip ratios by their largest change", "[eval][plan_distance]") {
  TensorPlan plan = plan_of(random_heads(uh, falling(0.7)), "U*H"), other = plan;
  plan.clip_ratio = {0.96, 0.90};
  other.clip_ratio = {0.95, 0.93};
  CHECK(*compared(plan, other).clip == Approx(0.03));
  CHECK(*compared(other, plan).clip == Approx(0.03));
  other.clip_ratio = {1.0, 0.92};
  CHECK(*compared(plan, other).clip == Approx(0.04));
  other.clip_ratio = {};
  other.coder =
      UniformCoder{.bits = 2, .group_size = kDim, .levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
  CHECK(!compared(plan, other).clip);
}

TEST_CASE("Centers by their largest relative change", "[eval][plan_distance]") {
  TensorPlan plan = identity_plan(), other = plan;
  plan.center.assign(kHeads * kSize, 0.0f);
  plan.center[3] = 4.0f;       // head 0: |mu| = 4
  plan.center[kSize] = -2.0f;  // head 1: |mu| = 2
  other.center = plan.center;
  other.center[5] = 1.0f;          // moved by 1 of 4
  other.center[kSize + 1] = 1.5f;  // by 1.5 of 2
  CHECK(*compared(other, plan).center == Approx(0.75));
  CHECK(*compared(plan, other).center == Approx(1.5 / 2.5));
  other.center = plan.center;
  for (float& x : other.center) x = -x;
  CHECK(*compared(other, plan).center == Approx(2.0));
}

TEST_CASE("Codebooks by the largest distance of an entry from the nearest one of the other", "[eval][plan_distance]") {
  using Tables = std::map<int, std::vector<float>>;
  const auto codebook = [](const Tables& a, const Tables& b) {
    return *compared(with_tables(a), with_tables(b)).codebook;
  };
  CHECK(codebook({{2, {0, 1, 2, 10}}}, {{2, {0, 9, 10, 11}}}) == Approx(2.0));  // 2 from 0; by index it would be 8
  CHECK(codebook({{2, {0, 9, 10, 11}}}, {{2, {0, 1, 2, 10}}}) == Approx(2.0));  // the same in the other direction
  CHECK(codebook({{2, {-1, 0, 1, 2}}}, {{2, {-1, 0, 1, 7}}}) == Approx(5.0));
  CHECK(codebook({{2, {-1, 0, 1, 2}}}, {{2, {-0.75f, 0.25f, 1.25f, 2.25f}}}) == Approx(0.25));
  CHECK(codebook({{1, {-1, 1}}, {2, {-1, 0, 1, 2}}}, {{1, {-1, 1.5f}}, {2, {-1, 0, 1, 2.25f}}}) == Approx(0.5));
  CHECK(codebook({{1, {-1, 1}}, {2, {-1, 0, 1, 2}}}, {{1, {-1, 1}}, {2, {-1, 0, 1, 2.25f}}}) == Approx(0.25));
}

TEST_CASE("A codebook for all is that codebook for each head", "[eval][plan_distance]") {
  const TensorPlan shared = with_tables({{2, {-3, -1, 1, 3}}}),
                   same = with_tables({{2, {-3, -1, 1, 3, -3, -1, 1, 3}}}, true);
  CHECK(*compared(same, shared).codebook == 0.0);
  CHECK(*compared(shared, same).codebook == 0.0);
}

TEST_CASE("Heads do not lend each other entries of their codebooks", "[eval][plan_distance]") {
  const TensorPlan one = with_tables({{2, {-3, -1, 1, 3.5f, -3, -1, 1, 3}}}, true),
                   two = with_tables({{2, {-3, -1, 1, 3, -3, -1, 1, 3.5f}}}, true);
  CHECK(*compared(one, two).codebook == Approx(0.5));
}

TEST_CASE("A codebook for all beside those of heads: every head counts, not the first alone", "[eval][plan_distance]") {
  const TensorPlan shared = with_tables({{2, {-3, -1, 1, 3}}}),
                   other = with_tables({{2, {-3, -1, 1, 3, -3, -1, 1, 3.5f}}}, true);
  CHECK(*compared(other, shared).codebook == Approx(0.5));
  CHECK(*compared(shared, other).codebook == Approx(0.5));
}

TEST_CASE("Trellises by the largest difference of a theta", "[eval][plan_distance]") {
  const TrellisTaps two{.bits = 2, .memory = 1, .theta = {1, 2, 3, 4}},
      three{.bits = 3, .memory = 1, .theta = {1, 2, 3, 4, 5, 6}};
  TrellisTaps moved = three;
  moved.theta[4] -= 0.25f;
  moved.theta[0] += 0.125f;
  CHECK(*compared(with_taps({two, three}), with_taps({two, moved})).trellis == Approx(0.25));
  CHECK(*compared(with_taps({two, moved}), with_taps({two, three})).trellis == Approx(0.25));
}

TEST_CASE("Centroids in another order are the same centroids", "[eval][plan_distance]") {
  for (const bool joint : {false, true}) {
    CAPTURE(joint);
    TensorPlan plan = with_centroids(joint), other = plan;
    for (std::size_t h = 0; h < kHeads; ++h)
      for (std::size_t c = 0; c < 4; ++c)
        std::ranges::copy(centroid(plan, h, c), centroid(other, h, (c + 3) % 4).begin());
    CHECK(*compared(other, plan).centroids == 0.0);
    CHECK(*compared(plan, other).centroids == 0.0);
  }
}

TEST_CASE("Centroids that moved by a known distance", "[eval][plan_distance]") {
  TensorPlan plan = with_centroids(false), other = plan;
  for (float& x : other.centroids->values) x += 0.5f;  // moves each centroid by 0.5 sqrt(D) = 2
  const double expected = 2.0 / std::min(spread(rows_of(plan, 0)), spread(rows_of(plan, 1)));
  const double least = 2.0 / std::max(spread(rows_of(plan, 0)), spread(rows_of(plan, 1)));
  for (const PlanDistance& found : {compared(other, plan), compared(plan, other)}) {
    CHECK(*found.centroids <= expected * (1.0 + 1e-5));
    CHECK(*found.centroids >= least * (1.0 - 1e-5));
  }
  // Both heads get the same centroids, so the matching of heads does not matter.
  std::copy_n(plan.centroids->values.begin(), 4 * kDim, plan.centroids->values.begin() + 4 * kDim);
  std::copy_n(other.centroids->values.begin(), 4 * kDim, other.centroids->values.begin() + 4 * kDim);
  CHECK(*compared(other, plan).centroids == Approx(2.0 / spread(rows_of(plan, 0))).epsilon(1e-5));
}

TEST_CASE("Joint centroids that moved by a known distance are measured over all heads", "[eval][plan_distance]") {
  TensorPlan plan = with_centroids(true), other = plan;
  for (float& x : other.centroids->values) x += 0.5f;  // moves each centroid by 0.5 sqrt(H D)
  std::vector<std::vector<double>> rows = rows_of(plan, 0);
  for (std::size_t c = 0; c < 4; ++c)
    rows[c].insert(rows[c].end(), centroid(plan, 1, c).begin(), centroid(plan, 1, c).end());
  const double expected = 0.5 * std::sqrt(2.0 * kDim) / spread(rows);
  // The distance of each head separately is about the same.
  CHECK(*compared(other, plan).centroids == Approx(expected).epsilon(0.2));
}

TEST_CASE("Joint centroids are of all heads: those of one head alone cannot change places", "[eval][plan_distance]") {
  TensorPlan joint = with_centroids(true), each = with_centroids(false);
  TensorPlan joint_mixed = joint, each_mixed = each;
  for (TensorPlan* plan : {&joint_mixed, &each_mixed}) {
    TensorPlan& source = plan == &joint_mixed ? joint : each;
    for (std::size_t c = 0; c < 4; ++c)
      std::ranges::copy(centroid(source, 1, c), centroid(*plan, 1, (c + 1) % 4).begin());
  }
  CHECK(*compared(each_mixed, each).centroids == 0.0);
  CHECK(*compared(joint_mixed, joint).centroids > 0.1);
}

TEST_CASE("Mixed widths: other rotations inside groups are no distance", "[eval][plan_distance]") {
  for (const std::uint64_t basis : {0u, 9u}) {
    CAPTURE(basis);
    const PlanDistance found =
        compared(mixed_plan({.seed = 1, .basis_seed = basis}), mixed_plan({.seed = 2, .basis_seed = basis}));
    REQUIRE(found.factor);
    CHECK(*found.factor < kFloat);
    // If widths move to other channels, only the distance of allocations changes.
    const PlanDistance elsewhere =
        compared(mixed_plan({.order_seed = 77, .basis_seed = basis}), mixed_plan({.basis_seed = basis}));
    CHECK(*elsewhere.factor < kFloat);
  }
}

TEST_CASE("Mixed widths: a rotation that is transposed, or gathers other channels than the plan says, shows",
          "[eval][plan_distance]") {
  for (const std::uint64_t basis : {0u, 9u}) {
    CAPTURE(basis);
    const TensorPlan sound = mixed_plan({.basis_seed = basis}),
                     turned = mixed_plan({.basis_seed = basis, .turned = true}),
                     gathered = mixed_plan({.basis_seed = basis, .other_order = true});
    CHECK(*compared(turned, sound).factor > 0.1);
    CHECK(*compared(gathered, sound).factor > 0.1);
    CHECK(*compared(sound, turned).factor < kFloat);  // the reference has the fault
    CHECK(*compared(gathered, gathered).factor == 0.0);
  }
}

TEST_CASE("Mixed widths: the fault of one head is enough", "[eval][plan_distance]") {
  const TensorPlan sound = mixed_plan({}), turned = mixed_plan({.turned = true});
  for (std::size_t h = 0; h < kHeads; ++h) {
    TensorPlan one = sound;
    std::copy_n(turned.rotation.matrix.begin() + static_cast<std::ptrdiff_t>(h * kSize * kSize), kSize * kSize,
                one.rotation.matrix.begin() + static_cast<std::ptrdiff_t>(h * kSize * kSize));
    CHECK(*compared(one, sound).factor > 0.1);
  }
}

TEST_CASE("Mixed widths: a head of one width may be mixed as a whole", "[eval][plan_distance]") {
  TensorPlan one = mixed_plan({}), two = mixed_plan({});
  for (TensorPlan* plan : {&one, &two}) {
    plan->rotation.matrix.clear();
    for (std::uint64_t h = 0; h < kHeads; ++h)
      append(plan->rotation.matrix, test::random_orthogonal(kDim, h + (plan == &one ? 0 : 50)));
    std::fill(plan->allocation->channel_bits.begin(), plan->allocation->channel_bits.end(), std::uint8_t{2});
  }
  CHECK(compared(one, two).factor.value_or(0.0) < kFloat);
}

TEST_CASE("A NaN in any head is not lost among the others", "[eval][plan_distance]") {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const TensorPlan sound = plan_of(random_heads(uh, falling(0.7)), "U*H");
  TensorPlan centered = identity_plan();
  centered.center.assign(kHeads * kSize, 1.0f);
  for (std::size_t h = 0; h < kHeads; ++h) {
    CAPTURE(h);
    TensorPlan plan = sound;
    plan.rotation.matrix[h * kSize * kSize + 5] = kNaN;
    CHECK(std::isnan(*compared(plan, sound).orthogonality));
    CHECK(std::isnan(*compared(plan, sound).factor));
    plan = sound;
    plan.rotation.eigenbasis[h * kSize * kSize + 5] = kNaN;
    CHECK(std::isnan(*compared(plan, sound).covariance));
    CHECK(std::isnan(*compared(plan, sound).angle));
    plan = sound;
    plan.rotation.spectrum[h * kSize] = kNaN;
    CHECK(std::isnan(*compared(plan, sound).covariance));
    plan = centered;
    plan.center[h * kSize + 3] = kNaN;
    CHECK(std::isnan(*compared(plan, centered).center));
    const TensorPlan tables = with_tables({{2, {-3, -1, 1, 3, -3, -1, 1, 3}}}, true);
    plan = tables;
    std::get<CodebookCoder>(plan.coder).tables[2][h * 4 + 1] = kNaN;
    CHECK(std::isnan(*compared(plan, tables).codebook));
    CHECK(std::isnan(*compared(tables, plan).codebook));
    const TensorPlan centroids = with_centroids(false);
    plan = centroids;
    plan.centroids->values[h * 4 * kSize + 3] = kNaN;
    CHECK(!std::isfinite(*compared(plan, centroids).centroids));
  }
}

TEST_CASE("Any two sides of one size are compared without a fault", "[eval][plan_distance]") {
  std::vector<std::pair<TensorPlan, std::pair<int, int>>> sides;  // with numbers of heads and channels
  for (const Artifact& artifact : {test::example_artifact(), test::featured_artifact()})
    for (const LayerPlan& layer : artifact.layers) {
      sides.emplace_back(layer.k, std::pair{layer.geometry.num_kv_heads, layer.geometry.head_dim});
      if (layer.v) sides.emplace_back(*layer.v, std::pair{layer.geometry.num_kv_heads, layer.geometry.v_head_dim});
    }
  const std::pair own{kHeads, kDim};
  for (const auto& [name, recipe] : recipes())
    sides.emplace_back(plan_of(random_heads(recipe, falling(0.7)), name), own);
  for (const TensorPlan& plan :
       {identity_plan(), mixed_plan({}), mixed_plan({.basis_seed = 9}), with_tables({{1, {0, 1}}}),
        with_tables({{2, {0, 1, 2, 3}}}), with_taps({{.bits = 2, .memory = 1, .theta = {1, 2, 3, 4}}}),
        with_taps({{.bits = 2, .memory = 2, .theta = {1, 2, 3, 4, 5, 6}}}),
        with_taps({{.bits = 3, .memory = 1, .theta = {1, 2, 3, 4, 5, 6}}}), with_centroids(false),
        with_centroids(true)})
    sides.emplace_back(plan, own);
  TensorPlan few = with_centroids(false);
  few.centroids->count = 1;
  few.centroids->values.resize(kHeads * kSize);
  sides.emplace_back(few, own);
  int pairs = 0;
  for (const auto& [a, size] : sides)
    for (const auto& [b, other_size] : sides) {
      if (size != other_size) continue;
      ++pairs;
      const PlanDistance found = plan_distance(a, b, size.first, size.second);
      for (const auto& [name, value] : fields(found)) {
        CAPTURE(name, a.rotation.recipe, b.rotation.recipe);
        if (value) CHECK(*value >= 0.0);  // false for NaN
      }
    }
  CHECK(pairs > 300);
}
