#include <kvq/codec/codec.h>

#include "support/compare.h"
#include "support/error_of.h"
#include "support/matrix.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

using namespace kvq;
using Catch::Matchers::StartsWith;

namespace {

struct Case {
  const char* name;
  TensorPlan plan;
  std::vector<std::vector<double>> matrices;       ///< A of each KV head
  std::vector<std::vector<double>> inverses = {};  ///< empty: the transposes
};

std::vector<double> inverse_of(const Case& each, int head, int dim) {
  const auto h = static_cast<std::size_t>(head);
  return each.inverses.empty() ? test::transpose(each.matrices[h], dim) : each.inverses[h];
}

std::vector<float> narrowed(const std::vector<double>& numbers) { return {numbers.begin(), numbers.end()}; }

/// diag(signs) @ blocks: the definition of a block Hadamard with signs in formats/artifact.md.
std::vector<double> signed_blocks(int dim, int order, const std::int8_t* signs) {
  std::vector<double> matrix = test::sylvester_blocks(dim, order);
  for (int i = 0; i < dim; ++i)
    for (int j = 0; j < dim; ++j) matrix[static_cast<std::size_t>(i * dim + j)] *= static_cast<double>(signs[i]);
  return matrix;
}

TensorPlan dense_plan(Scope scope, std::vector<float> matrix) {
  TensorPlan plan;
  plan.rotation.kind = RotationKind::dense;
  plan.rotation.scope = scope;
  plan.rotation.matrix = std::move(matrix);
  return plan;
}

TensorPlan block_plan(int order, std::vector<std::int8_t> signs) {
  TensorPlan plan;
  plan.rotation.kind = RotationKind::block_hadamard;
  plan.rotation.order = order;
  plan.rotation.signs = std::move(signs);
  return plan;
}

std::vector<double> diagonal(const float* numbers, int dim, bool inverted) {
  std::vector<double> matrix(static_cast<std::size_t>(dim * dim), 0.0);
  for (int i = 0; i < dim; ++i)
    matrix[static_cast<std::size_t>(i * dim + i)] =
        inverted ? 1.0 / static_cast<double>(numbers[i]) : static_cast<double>(numbers[i]);
  return matrix;
}

/// Maps that are not orthogonal, in every way to store them: of formats/artifact.md, "Transforms".
std::vector<Case> transforms(int dim, int order, const std::vector<std::int8_t>& signs) {
  const auto size = static_cast<std::size_t>(dim);
  std::vector<float> scale(2 * size);
  for (std::size_t j = 0; j < scale.size(); ++j)
    scale[j] = std::ldexp(1.0f + static_cast<float>(j * 5 % 128) / 128.0f, static_cast<int>(j * 7 % 5) - 2);
  Case dense{"dense with inverse", dense_plan(Scope::kv_head, {}), {}};
  Case identity{"scaled identity", {}, {}}, blocks{"scaled blocks with signs", block_plan(order, signs), {}};
  for (std::size_t h = 0; h < 2; ++h) {
    const float* own = scale.data() + h * size;
    const auto left = test::random_orthogonal(dim, 10 + h), right = test::random_orthogonal(dim, 20 + h);
    const auto stretch = diagonal(own, dim, false), shrink = diagonal(own, dim, true);
    const auto a = narrowed(test::multiply(test::multiply(left, stretch, dim), right, dim));
    const auto inverse = narrowed(
        test::multiply(test::multiply(test::transpose(right, dim), shrink, dim), test::transpose(left, dim), dim));
    dense.plan.rotation.matrix.insert(dense.plan.rotation.matrix.end(), a.begin(), a.end());
    dense.plan.rotation.inverse.insert(dense.plan.rotation.inverse.end(), inverse.begin(), inverse.end());
    dense.matrices.push_back(test::widened(a)), dense.inverses.push_back(test::widened(inverse));
    identity.matrices.push_back(stretch), identity.inverses.push_back(shrink);
    const auto rotation = signed_blocks(dim, order, signs.data() + h * size);
    blocks.matrices.push_back(test::multiply(stretch, rotation, dim));
    blocks.inverses.push_back(test::multiply(test::transpose(rotation, dim), shrink, dim));
  }
  identity.plan.rotation.channel_scale = blocks.plan.rotation.channel_scale = scale;
  Case shared = identity;
  shared.name = "scaled identity, shared";
  shared.plan.rotation.scope = Scope::layer;
  shared.plan.rotation.channel_scale.resize(size);
  shared.matrices[1] = shared.matrices[0], shared.inverses[1] = shared.inverses[0];
  return {dense, identity, blocks, shared};
}

/// Every kind and scope for two KV heads.
std::vector<Case> cases(int dim, int order) {
  const auto size = static_cast<std::size_t>(dim);
  test::Random random(static_cast<std::uint64_t>(dim));
  std::vector<std::int8_t> signs(2 * size);
  for (auto& sign : signs) sign = random.bits() & 1u ? std::int8_t{1} : std::int8_t{-1};
  std::vector<float> dense;
  std::vector<std::vector<double>> dense_heads;
  for (std::uint64_t head = 0; head < 2; ++head) {
    const std::vector<float> matrix = narrowed(test::random_orthogonal(dim, head + 1));
    dense.insert(dense.end(), matrix.begin(), matrix.end());
    dense_heads.push_back(test::widened(matrix));
  }
  const std::vector<float> first(dense.begin(), dense.begin() + dim * dim);
  const auto plain = test::sylvester_blocks(dim, order);
  const std::vector<float> center = test::gaussian(2 * size, 77);

  std::vector<Case> all;
  all.push_back({"identity", {}, {test::identity(dim), test::identity(dim)}});
  all.push_back({"dense", dense_plan(Scope::kv_head, dense), dense_heads});
  all.push_back({"dense, shared", dense_plan(Scope::layer, first), {dense_heads[0], dense_heads[0]}});
  all.push_back({"blocks", block_plan(order, {}), {plain, plain}});
  all.push_back({"blocks with signs",
                 block_plan(order, signs),
                 {signed_blocks(dim, order, signs.data()), signed_blocks(dim, order, signs.data() + dim)}});
  for (Case& each : transforms(dim, order, signs)) all.push_back(std::move(each));
  const std::size_t count = all.size();
  for (std::size_t i = 0; i < count; ++i) {
    Case centered = all[i];
    centered.plan.center = center;
    if (centered.plan.rotation.scope == Scope::layer) centered.plan.center.resize(size);
    all.push_back(centered);
  }
  return all;
}

std::vector<double> center_of(const TensorPlan& plan, int head, int dim) {
  if (plan.center.empty()) return std::vector<double>(static_cast<std::size_t>(dim), 0.0);
  const float* begin = plan.center.data() + plan.rotation.head_index(head) * dim;
  return {begin, begin + dim};
}

}  // namespace

TEST_CASE("Rotating a row is (x - center) @ A, and rotating back is its inverse", "[codec]") {
  for (const auto& [dim, order] : {std::pair{1, 1}, {8, 8}, {12, 4}, {64, 16}, {96, 32}, {128, 128}})
    for (const Case& each : cases(dim, order))
      for (int head = 0; head < 2; ++head) {
        INFO(each.name << (each.plan.center.empty() ? "" : ", centered") << ", dim " << dim << ", head " << head);
        const auto size = static_cast<std::size_t>(dim);
        const std::vector<float> x = test::gaussian(size, static_cast<std::uint64_t>(100 + dim + head), 3.0);
        const std::vector<double> center = center_of(each.plan, head, dim);
        const std::vector<double>& r = each.matrices[static_cast<std::size_t>(head)];
        const std::vector<double> inverse = inverse_of(each, head, dim);
        std::vector<double> expected(size, 0.0), back(size, 0.0);
        for (std::size_t j = 0; j < size; ++j)
          for (std::size_t i = 0; i < size; ++i)
            expected[j] += (static_cast<double>(x[i]) - center[i]) * r[i * size + j];

        std::vector<float> rotated(size), returned(size);
        rotate_row(each.plan, head, x, rotated);
        const double room =
            each.inverses.empty() ? 1.0 : 8.0;  // numbers up to 4 times larger, and a condition of about 2
        CHECK(test::largest_difference(rotated, expected) < 2e-6 * room);
        unrotate_row(each.plan, head, rotated, returned);
        for (std::size_t i = 0; i < size; ++i)
          for (std::size_t j = 0; j < size; ++j) back[i] += static_cast<double>(rotated[j]) * inverse[j * size + i];
        for (std::size_t i = 0; i < size; ++i) back[i] += center[i];
        CHECK(test::largest_difference(returned, back) < 2e-6 * room);
        CHECK(test::largest_difference(returned, x) < 5e-6 * room);
      }
}

TEST_CASE("An identity leaves every bit of a row alone", "[codec]") {
  const std::vector<float> x = {1.0f, -0.0f, 1e-40f, 3e38f};
  std::vector<float> rotated(4), returned(4);
  rotate_row(TensorPlan{}, 0, x, rotated);
  CHECK(test::largest_difference(rotated, x) == 0.0);
  unrotate_row(TensorPlan{}, 0, rotated, returned);
  CHECK(test::largest_difference(returned, x) == 0.0);
}

TEST_CASE("A map keeps q . k: queries take the transpose of its inverse", "[codec]") {
  for (const Case& each : cases(64, 16)) {
    if (!each.plan.center.empty()) continue;
    INFO(each.name);
    const std::vector<float> q = test::gaussian(64, 1), k = test::gaussian(64, 2);
    const std::vector<double> inverse = inverse_of(each, 1, 64);
    std::vector<double> q_rotated(64, 0.0);
    std::vector<float> k_rotated(64);
    for (std::size_t j = 0; j < 64; ++j)
      for (std::size_t i = 0; i < 64; ++i) q_rotated[j] += static_cast<double>(q[i]) * inverse[j * 64 + i];
    rotate_row(each.plan, 1, k, k_rotated);
    double before = 0.0, after = 0.0;
    for (std::size_t i = 0; i < 64; ++i) {
      before += static_cast<double>(q[i]) * static_cast<double>(k[i]);
      after += q_rotated[i] * static_cast<double>(k_rotated[i]);
    }
    CHECK(after == Approx(before).margin(1e-5));
  }
}

TEST_CASE("Reconstructing is rotate, code, decode, rotate back, row after row, with the head's own clip", "[codec]") {
  for (Case each : cases(64, 16)) {
    INFO(each.name);
    each.plan.coder = UniformCoder{.bits = 3, .group_size = 16};
    each.plan.clip_ratio = {0.9, 0.7};
    if (each.plan.rotation.scope == Scope::layer) each.plan.clip_ratio = {0.7};
    for (int head = 0; head < 2; ++head) {
      std::vector<float> rows = test::gaussian(3 * 64, static_cast<std::uint64_t>(head)), expected(3 * 64);
      for (std::size_t row = 0; row < 3; ++row) {
        std::vector<float> rotated(64);
        rotate_row(each.plan, head, std::span(rows).subspan(row * 64, 64), rotated);
        quantize_row(each.plan.coder, each.plan.rotation.scope == Scope::layer || head == 1 ? 0.7 : 0.9, rotated);
        unrotate_row(each.plan, head, rotated, std::span(expected).subspan(row * 64, 64));
      }
      reconstruct(each.plan, head, rows, 64);
      CHECK(test::first_bit_difference(rows, expected) == "");
    }
  }
}

TEST_CASE("Reconstructing refuses rows that are not finite after the rotation", "[codec]") {
  TensorPlan codes, exact = block_plan(4, {});
  codes.rotation = exact.rotation;
  codes.coder = UniformCoder{.bits = 3, .group_size = 4};
  for (const TensorPlan& plan : {codes, exact})
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 3e38f}) {
      std::vector<float> rows(12, 1.0f), heads;
      std::fill(rows.begin() + 4, rows.begin() + 8, bad);  // twice 3e38 in channel 0 overflows
      heads = rows;
      CHECK_THAT(test::error_text([&] { reconstruct(plan, 0, rows, 4); }), StartsWith("numerical: row to encode: "));
      CHECK_THAT(test::error_text([&] { reconstruct_heads(plan, 1, heads, 4); }),
                 StartsWith("numerical: row to encode: "));
    }
}
