#include "write_case.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

using namespace kvq;
using namespace kvq::test;

namespace {

/// The codec's words for one side of a variant.
TensorPlan plan_of(const TileSide& side, bool bfloat, ScaleRule rule, int order, const WriteCase& c,
                   const std::vector<float>& center) {
  TensorPlan plan;
  UniformCoder coder;
  coder.bits = side.bits, coder.group_size = side.group_size, coder.rule = rule;
  coder.levels = side.numbers == 2 ? UniformLevels::affine : UniformLevels::symmetric;
  coder.scale_type = bfloat ? ScaleType::bf16 : ScaleType::fp16;
  plan.coder = coder;
  plan.center = center;
  if (order > 1) plan.rotation = {.kind = RotationKind::block_hadamard, .order = order, .signs = c.signs};
  return plan;
}

struct Difference {
  std::string where;  ///< the first byte that must not differ and does; empty if none
  std::int64_t codes = 0, differing = 0, far = 0;
};

/// Codes the case with the codec and compares pages. @param exact  every byte, else codes may differ by one
Difference compare(const WriteVariant& variant, const WriteCase& c, bool exact) {
  const PageLayout layout{variant.k, variant.v, c.num_kv_heads, c.page_size};
  const auto page_bytes = static_cast<std::size_t>(layout.page_bytes());
  const std::vector<std::byte> before(page_bytes * static_cast<std::size_t>(c.num_pages), std::byte{0xA5});
  std::vector<std::byte> expected = before;
  const std::vector<std::byte> found = run_write_case(variant, c, before);
  Difference difference;
  for (const CacheSide which : {CacheSide::k, CacheSide::v}) {
    const bool value = which == CacheSide::v, bfloat = value ? variant.v_bfloat : variant.k_bfloat;
    const TileSide& side = value ? variant.v : variant.k;
    const ScaleType type = bfloat ? ScaleType::bf16 : ScaleType::fp16;
    const auto dim = static_cast<std::size_t>(side.head_dim);
    const TensorPlan plan = plan_of(side, bfloat, value ? c.rule_v : c.rule_k, value ? c.order_v : c.order_k, c,
                                    value ? c.center_v : c.center_k);
    for (int head = 0; head < c.num_kv_heads; ++head) {
      const RowCodec codec(plan, head, side.head_dim);
      for (int token = 0; token < c.num_tokens; ++token) {
        const std::int64_t slot = c.slot_mapping[static_cast<std::size_t>(token)];
        if (slot < 0) continue;
        std::vector<float> x(dim), rotated(dim), numbers(static_cast<std::size_t>(codec.num_numbers()));
        std::vector<std::uint8_t> codes(dim);
        for (std::size_t i = 0; i < dim; ++i)
          x[i] = from_16_bits(
              (value ? c.v : c.k)[(static_cast<std::size_t>(token) * static_cast<std::size_t>(c.num_kv_heads) +
                                   static_cast<std::size_t>(head)) *
                                      dim +
                                  i],
              variant.bf16);
        rotate_row(plan, head, x, rotated);
        codec.encode(rotated, codes, numbers);
        const auto page =
            std::span(expected).subspan(static_cast<std::size_t>(slot / c.page_size) * page_bytes, page_bytes);
        const int in_page = static_cast<int>(slot % c.page_size);
        if (exact) {
          store_page_row(layout, which, type, head, in_page, codes, numbers, page);
          continue;
        }
        std::vector<std::uint8_t> theirs(dim);
        std::vector<float> their_numbers(numbers.size());
        load_page_row(layout, which, type, head, in_page,
                      std::span(found).subspan(static_cast<std::size_t>(slot / c.page_size) * page_bytes, page_bytes),
                      theirs, their_numbers);
        for (std::size_t i = 0; i < dim; ++i) {
          ++difference.codes;
          difference.differing += theirs[i] != codes[i];
          difference.far += std::abs(theirs[i] - codes[i]) > 1;
        }
        for (std::size_t i = 0; i < numbers.size(); ++i)
          if (std::abs(their_numbers[i] - numbers[i]) > 0.01f * std::abs(numbers[i]) + 1e-3f &&
              difference.where.empty())
            difference.where =
                "token " + std::to_string(token) + " head " + std::to_string(head) + " number " + std::to_string(i);
      }
    }
  }
  if (exact) {
    const auto at = std::mismatch(expected.begin(), expected.end(), found.begin()).first;
    if (at != expected.end())
      difference.where = "byte " + std::to_string(at - expected.begin()) + " of pages of " + std::to_string(page_bytes);
  }
  return difference;
}

ScaleRule rule_of(const TileSide& side, ScaleRule symmetric) {
  return side.numbers == 2 ? ScaleRule::minmax : symmetric;
}

/// Random rows, some of them hard: constant, zero, one outlier, huge, tiny.
WriteCase random_case(const WriteVariant& variant, int num_tokens, int num_kv_heads, int page_size, unsigned seed,
                      bool hard) {
  WriteCase c;
  c.num_tokens = num_tokens, c.num_kv_heads = num_kv_heads, c.page_size = page_size;
  c.num_pages = (num_tokens + page_size - 1) / page_size + 2;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto rows = [&](int dim) {
    std::vector<std::uint16_t> all;
    for (int r = 0; r < num_tokens * num_kv_heads; ++r) {
      const int kind = hard ? r % 8 : 7;
      const float size = kind == 3 ? 1e4f : kind == 4 ? 1e-6f : 1.0f;
      for (int i = 0; i < dim; ++i) {
        float x = normal(random) * size;
        if (kind == 0) x = 0.0f;
        if (kind == 1) x = -0.3f;
        if (kind == 2) x = i == 5 ? 100.0f : 0.0f;
        if (kind == 5) x = static_cast<float>(i % 4) - 1.5f;  // on the edges between codes
        if (kind == 6) x = i % 2 ? -0.0f : 0.0f;
        all.push_back(to_16_bits(x, variant.bf16));
      }
    }
    return all;
  };
  c.k = rows(variant.k.head_dim), c.v = rows(variant.v.head_dim);
  for (int i = 0; i < num_tokens; ++i) c.slot_mapping.push_back(page_size + i);
  c.rule_k = rule_of(variant.k, ScaleRule::norm), c.rule_v = rule_of(variant.v, ScaleRule::norm);
  return c;
}

}  // namespace

TEST_CASE("Unrotated rows are coded bit by bit as the codec does", "[runtime][gpu]") {
  const int page_size = GENERATE(16, 32, 64);
  const ScaleRule symmetric = GENERATE(ScaleRule::norm, ScaleRule::absmax, ScaleRule::least_squares);
  for (const WriteVariant* variant : write_variants()) {
    CAPTURE(variant->name, page_size, to_string(symmetric));
    WriteCase c = random_case(*variant, 160, 3, page_size, 1, true);
    c.rule_k = rule_of(variant->k, symmetric), c.rule_v = rule_of(variant->v, symmetric);
    CHECK(compare(*variant, c, true).where == "");
  }
}

TEST_CASE("Tokens go where the slot mapping says, and nowhere else", "[runtime][gpu]") {
  const int tokens = GENERATE(1, 15, 16, 17, 83);
  for (const WriteVariant* variant : write_variants()) {
    CAPTURE(variant->name, tokens);
    WriteCase c = random_case(*variant, tokens, 2, 32, 2, false);
    std::mt19937 random(3);
    std::shuffle(c.slot_mapping.begin(), c.slot_mapping.end(), random);
    if (tokens > 2) c.slot_mapping[1] = -1;
    CHECK(compare(*variant, c, true).where == "");
    // Not at the beginning of a tile.
    for (int i = 0; i < tokens; ++i) c.slot_mapping[static_cast<std::size_t>(i)] = 5 + i;
    CHECK(compare(*variant, c, true).where == "");
  }
}

TEST_CASE("Centres are subtracted first", "[runtime][gpu]") {
  for (const WriteVariant* variant : write_variants()) {
    CAPTURE(variant->name);
    WriteCase c = random_case(*variant, 48, 2, 64, 4, false);
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 2 * variant->k.head_dim; ++i)
      c.center_k.push_back(normal(random)), c.center_v.push_back(normal(random));
    CHECK(compare(*variant, c, true).where == "");
  }
}

TEST_CASE("Hadamard blocks of every order", "[runtime][gpu]") {
  const int order = GENERATE(2, 4, 8, 16, 32, 64, 128, 256);
  const bool signs = GENERATE(false, true), centers = GENERATE(false, true);
  for (const WriteVariant* variant : write_variants()) {
    if (variant->k.head_dim % order != 0) continue;
    CAPTURE(variant->name, order, signs, centers);
    WriteCase c = random_case(*variant, 160, 2, 64, 6, false);
    c.order_k = order, c.order_v = std::max(1, order / 2);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    if (signs)
      for (int i = 0; i < 2 * variant->k.head_dim; ++i) c.signs.push_back(random() & 1 ? 1 : -1);
    if (centers)
      for (int i = 0; i < 2 * variant->k.head_dim; ++i)
        c.center_k.push_back(normal(random)), c.center_v.push_back(normal(random));
    const Difference difference = compare(*variant, c, false);
    CHECK(difference.where == "");
    CHECK(difference.far == 0);
    // Only quotients within the rotation's rounding of an edge may fall on its other side.
    CHECK(static_cast<double>(difference.differing) <= 2e-3 * static_cast<double>(difference.codes));
  }
}

TEST_CASE("No tokens, nothing written", "[runtime][gpu]") {
  for (const WriteVariant* variant : write_variants())
    CHECK(compare(*variant, random_case(*variant, 0, 1, 16, 8, false), true).where == "");
}
