#include "write_compare.h"

#include "support/transforms.h"

#include <kvq/core/dtype.h>
#include <kvq/runtime/prepare.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

using namespace kvq;
using namespace kvq::test;

namespace {

/// A code may differ only if x_rot is within the rotation's rounding error of an edge. More codes may differ if terms
/// cancel.
void check_rotated(const Difference& difference) {
  CHECK(difference.where == "");
  CHECK(difference.far == 0);
  CHECK(difference.inside == 0);
  CHECK(static_cast<double>(difference.differing) <=
        2e-4 * difference.canceled * static_cast<double>(difference.codes));
  CHECK(static_cast<double>(difference.other_group_params) <=
        2e-2 * difference.canceled * static_cast<double>(difference.rows) + 1);
}

/// Rows [T, Hkv, D] that the transforms map to `rows`, so that the terms of the products cancel.
/// @param inverse  of the transforms, [Hkv, D, D] or one for all heads
std::vector<std::uint16_t> before_transform(const std::vector<std::uint16_t>& rows, const std::vector<float>& inverse,
                                            int heads, int dim, bool bf16) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<std::uint16_t> all(rows.size());
  for (std::size_t row = 0; row < rows.size() / d; ++row) {
    const std::size_t head = row % static_cast<std::size_t>(heads), entry = inverse.size() == d * d ? 0 : head;
    for (std::size_t i = 0; i < d; ++i) {
      double sum = 0.0;
      for (std::size_t j = 0; j < d; ++j)
        sum += static_cast<double>(from_16_bits(rows[row * d + j], bf16)) *
               static_cast<double>(inverse[(entry * d + j) * d + i]);
      all[row * d + i] = to_16_bits(static_cast<float>(sum), bf16);
    }
  }
  return all;
}

/// Divides rows by their channel scales, so that scaled channels have equal size, as with calibrated plans.
void unscale(WriteCase& c, int dim, bool bf16) {
  const auto each = static_cast<std::size_t>(c.num_kv_heads * dim);
  for (auto [rows, scale] : {std::pair{&c.k, &c.scale_k}, std::pair{&c.v, &c.scale_v}})
    for (std::size_t i = 0; i < rows->size(); ++i)
      (*rows)[i] = to_16_bits(from_16_bits((*rows)[i], bf16) / (*scale)[i % each], bf16);
}

/// A case with transforms on both sides, one for each head and one for all heads.
/// @param cancel  rows for which terms cancel, as with calibrated transforms
WriteCase transformed_case(const WriteVariant& variant, double condition, bool cancel, int tokens, unsigned seed) {
  const int dim = variant.k.head_dim;
  WriteCase c = random_case(variant, tokens, 2, 64, seed, false);
  const Transform k = random_transforms(2, dim, condition, seed + 1, 3),
                  v = random_transform(dim, condition, seed + 7, 3);
  c.matrix_k = k.matrix, c.inverse_k = k.inverse, c.matrix_v = v.matrix, c.inverse_v = v.inverse;
  if (!cancel) return c;
  c.k = before_transform(c.k, c.inverse_k, 2, dim, variant.bf16);
  c.v = before_transform(c.v, c.inverse_v, 2, dim, variant.bf16);
  return c;
}

/// Rounding error of the two 16-bit parts of A and of sums in float32, relative to sum_i |x_i| |A_ij|.
constexpr double kTransformError = 0x1p-16;

/// Random orthogonal matrices: products of Householder reflections. @return  [count, D, D]
std::vector<float> random_rotations(int count, int dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto d = static_cast<std::size_t>(dim);
  std::vector<float> all;
  for (int m = 0; m < count; ++m) {
    std::vector<double> q(d * d);
    for (std::size_t i = 0; i < d; ++i) q[i * d + i] = 1.0;
    for (int reflection = 0; reflection < 24; ++reflection) {
      std::vector<double> u(d);
      double square = 0.0;
      for (double& x : u) x = normal(random), square += x * x;
      for (std::size_t i = 0; i < d; ++i) {
        double dot = 0.0;
        for (std::size_t j = 0; j < d; ++j) dot += q[i * d + j] * u[j];
        for (std::size_t j = 0; j < d; ++j) q[i * d + j] -= 2.0 * dot / square * u[j];
      }
    }
    for (const double x : q) all.push_back(static_cast<float>(x));
  }
  return all;
}

std::vector<float> random_center(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> center(static_cast<std::size_t>(count));
  for (float& x : center) x = normal(random);
  return center;
}

/// The same tokens in another order, each with its destination.
WriteCase shuffled(const WriteVariant& variant, const WriteCase& c, unsigned seed) {
  std::vector<std::size_t> order(c.slot_mapping.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  const auto heads = static_cast<std::size_t>(c.num_kv_heads);
  const std::size_t k_token = heads * static_cast<std::size_t>(variant.k.head_dim),
                    v_token = heads * static_cast<std::size_t>(variant.v.head_dim);
  WriteCase other = c;
  for (std::size_t i = 0; i < order.size(); ++i) {
    std::copy_n(c.k.begin() + static_cast<std::ptrdiff_t>(order[i] * k_token), k_token,
                other.k.begin() + static_cast<std::ptrdiff_t>(i * k_token));
    std::copy_n(c.v.begin() + static_cast<std::ptrdiff_t>(order[i] * v_token), v_token,
                other.v.begin() + static_cast<std::ptrdiff_t>(i * v_token));
    other.slot_mapping[i] = c.slot_mapping[order[i]];
  }
  return other;
}

}  // namespace

TEST_CASE("Unrotated rows are quantized bit by bit as the codec does", "[runtime][gpu]") {
  const int page_size = GENERATE(16, 32, 64);
  const ScaleRule symmetric = GENERATE(ScaleRule::norm, ScaleRule::absmax, ScaleRule::least_squares);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, page_size, to_string(symmetric));
    WriteCase c = random_case(*variant, 160, 3, page_size, 1, true);
    c.rule_k = rule_of(variant->k, symmetric), c.rule_v = rule_of(variant->v, symmetric);
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

TEST_CASE("Tokens go where the slot mapping says, and nowhere else", "[runtime][gpu][emulated]") {
  const int tokens = GENERATE(1, 15, 16, 17, 83);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, tokens);
    WriteCase c = random_case(*variant, tokens, 2, 32, 2, false);
    std::mt19937 random(3);
    std::shuffle(c.slot_mapping.begin(), c.slot_mapping.end(), random);
    if (tokens > 2) c.slot_mapping[1] = -1;
    CHECK(compare_bytes(*variant, c).where == "");
    // Not at the beginning of a tile.
    for (int i = 0; i < tokens; ++i) c.slot_mapping[static_cast<std::size_t>(i)] = 5 + i;
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

TEST_CASE("Centers are subtracted first", "[runtime][gpu][emulated]") {
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name);
    WriteCase c = random_case(*variant, 48, 2, 64, 4, false);
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 2 * variant->k.head_dim; ++i)
      c.center_k.push_back(normal(random)), c.center_v.push_back(normal(random));
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

TEST_CASE("Hadamard blocks of every order", "[runtime][gpu]") {
  const int order = GENERATE(2, 4, 8, 16, 32, 64, 128, 256);
  const bool signs = GENERATE(false, true), centers = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
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
    // Half of the margin of firm golden rows (formats/artifact.md).
    check_rotated(compare_codes(*variant, c, 0x1p-19));
  }
}

TEST_CASE("No tokens, nothing written", "[runtime][gpu][emulated]") {
  for (const WriteVariant* variant : plain_write_variants())
    CHECK(compare_bytes(*variant, random_case(*variant, 0, 1, 16, 8, false)).where == "");
}

TEST_CASE("Rows are clipped bit by bit as the codec does", "[runtime][gpu]") {
  // For 128 channels the ranks 1, 2, 6, 7, 20, 64, 127 and 128; and no clip.
  const double ratio = GENERATE(0.999, 0.985, 0.96, 0.95, 0.85, 0.5, 0.01, 0.001);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, ratio);
    WriteCase c = random_case(*variant, 400, 3, 64, 9, true);
    c.clip_k = {ratio, 1.0, 0.92}, c.clip_v = {0.97, ratio, 1.0};
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

TEST_CASE("Clips of rows where magnitudes are equal, next to each other or far apart", "[runtime][gpu][emulated]") {
  const double ratio = GENERATE(0.999, 0.985, 0.96, 0.95, 0.5, 0.001);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, ratio);
    WriteCase c = random_case(*variant, 208, 2, 64, 24, false);
    c.clip_k = {ratio, 0.96}, c.clip_v = {0.96, ratio};
    std::mt19937 random(25);
    const auto fill = [&](std::vector<std::uint16_t>& rows, int dim) {
      for (std::size_t first = 0; first < rows.size(); first += static_cast<std::size_t>(dim)) {
        const int kind = static_cast<int>(random() % 8), outliers = static_cast<int>(random() % 12);
        for (int i = 0; i < dim; ++i) {
          const bool out = i * 37 % dim < outliers;
          float x = from_16_bits(rows[first + static_cast<std::size_t>(i)], variant->bf16);
          if (kind == 0) x = out ? 3.0f : 1.0f;                                 // two magnitudes
          if (kind == 1) x = out ? 8.0f + x : 0.0f;                             // zeros beside outliers
          if (kind == 2) x = 1.0f + static_cast<float>(random() % 8) / 128.0f;  // of one level, some equal
          if (kind == 3) x = std::ldexp(1.0f, i % 24 - 12);                     // each far from the next
          if (kind == 4) x = out ? x * 4096.0f : x / 4096.0f;                   // all but the outliers of one level
          if (kind == 5) x = out ? 255.0f : 128.0f + static_cast<float>(i % 127);
          if (kind == 6) x = out ? 1.0f : 1.0f / 256.0f;  // on a level's end
          rows[first + static_cast<std::size_t>(i)] = to_16_bits(random() & 1 ? x : -x, variant->bf16);
        }
      }
    };
    fill(c.k, variant->k.head_dim), fill(c.v, variant->v.head_dim);
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

/// Rows of NaNs and infinities, among others.
WriteCase spoilt_case(const WriteVariant& variant, bool hard) {
  WriteCase c = random_case(variant, 96, 2, 32, 26, hard);
  const auto spoil = [&](std::vector<std::uint16_t>& rows, int dim) {
    const auto token = static_cast<std::size_t>(c.num_kv_heads * dim);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t kind = i / token % 5, channel = i % static_cast<std::size_t>(dim);
      if (kind == 1) rows[i] = 0x7FFF;                            // NaNs
      if (kind == 2 && channel == 7) rows[i] = 0xFFFF;            // one of them
      if (kind == 3) rows[i] = variant.bf16 ? 0x7F80u : 0x7C00u;  // infinities
      if (kind == 4 && channel % 9 == 0) rows[i] = variant.bf16 ? 0xFF80u : 0xFC00u;
    }
  };
  spoil(c.k, variant.k.head_dim), spoil(c.v, variant.v.head_dim);
  return c;
}

TEST_CASE("Rows of NaNs and infinities are poisoned, and change no other row", "[runtime][gpu][emulated]") {
  const bool clips = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, clips);
    WriteCase c = spoilt_case(*variant, true);
    if (clips) c.clip_k = {0.96, 0.5}, c.clip_v = {0.001, 0.985};
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

TEST_CASE("So are rotated rows", "[runtime][gpu][emulated]") {
  const bool clips = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, clips);
    WriteCase c = spoilt_case(*variant, false);
    c.order_k = variant->k.head_dim & -variant->k.head_dim, c.order_v = 16;
    if (clips) c.clip_k = {0.96, 0.5}, c.clip_v = {0.9, 0.985};
    check_rotated(compare_codes(*variant, c, 0x1p-19));
  }
}

TEST_CASE("Rotated rows are clipped", "[runtime][gpu][emulated]") {
  const double ratio = GENERATE(0.985, 0.96, 0.9);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, ratio);
    WriteCase c = random_case(*variant, 320, 2, 64, 10, false);
    c.order_k = 32, c.order_v = 16;
    c.clip_k = {ratio, 0.96}, c.clip_v = {1.0, ratio};
    check_rotated(compare_codes(*variant, c, 0x1p-19));
  }
}

TEST_CASE("Dense rotations, with centers and clips", "[runtime][gpu]") {
  const bool centers = GENERATE(false, true), clips = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, centers, clips);
    const int dim = variant->k.head_dim;
    WriteCase c = random_case(*variant, 333, 2, 64, 11, false);
    c.matrix_k = random_rotations(2, dim, 12), c.matrix_v = random_rotations(2, dim, 13);
    if (centers) c.center_k = random_center(2 * dim, 14), c.center_v = random_center(2 * dim, 15);
    if (clips) c.clip_k = {0.96, 1.0}, c.clip_v = {0.9, 0.99};
    check_rotated(compare_codes(*variant, c, 0x1p-17));
  }
}

TEST_CASE("Warps that take several runs of tokens, of more heads than divide them", "[runtime][gpu]") {
  for (const WriteVariant* variant : plain_write_variants()) {
    WriteLaunch launch;
    REQUIRE(variant->plan(launch).ok());
    // At most sixteen warps a multiprocessor: seven for the twenty runs of a head, and some warps stay idle.
    const int heads = 2 * launch.multiprocessors + 7;
    CAPTURE(variant->name, heads);
    WriteCase c = random_case(*variant, 152, heads, 64, 27, false);
    CHECK(compare_bytes(*variant, c).where == "");
    // Values have a launch of their own, because keys need another kernel.
    c.matrix_k = random_rotations(1, variant->k.head_dim, 28), c.order_v = 32;
    check_rotated(compare_codes(*variant, c, 0x1p-17));
  }
}

TEST_CASE("Blocks of a dense write that take several rounds of tokens", "[runtime][gpu]") {
  for (const WriteVariant* variant : plain_write_variants()) {
    WriteLaunch launch;
    REQUIRE(variant->plan(launch).ok());
    // More than half as many heads and sides as there are multiprocessors get one block each.
    const int dim = variant->k.head_dim, heads = launch.multiprocessors / 4 + 1;
    CAPTURE(variant->name, heads);
    WriteCase c = random_case(*variant, 520, heads, 64, 24, false);
    c.matrix_k = random_rotations(1, dim, 25), c.matrix_v = random_rotations(1, dim, 26);
    c.clip_k = {0.96}, c.clip_v = {0.92};
    check_rotated(compare_codes(*variant, c, 0x1p-17));
  }
}

TEST_CASE("What a rotated row gets does not depend on the rows beside it", "[runtime][gpu]") {
  const bool dense = GENERATE(false, true), clips = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, dense, clips);
    const int dim = variant->k.head_dim;
    WriteCase c = random_case(*variant, 209, 2, 32, 20, true);
    if (dense)
      c.matrix_k = random_rotations(2, dim, 21), c.matrix_v = random_rotations(2, dim, 22);
    else
      c.order_k = 32, c.order_v = 16;
    if (clips) c.clip_k = {0.96, 0.5}, c.clip_v = {0.92, 1.0};
    const auto written = [&](const WriteCase& order) {
      const PageLayout layout{variant->k, variant->v, c.num_kv_heads, c.page_size};
      return run_write_case(*variant, order,
                            std::vector<std::byte>(static_cast<std::size_t>(layout.page_bytes() * c.num_pages)));
    };
    CHECK((written(c) == written(shuffled(*variant, c, 23))));
  }
}

TEST_CASE("One dense rotation for all heads, of one side", "[runtime][gpu][emulated]") {
  const Side side = GENERATE(Side::k, Side::v);
  const int tokens = GENERATE(1, 17, 300);
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, name(side), tokens);
    const int dim = variant->k.head_dim;
    WriteCase c = random_case(*variant, tokens, 3, 32, 16, false);
    (side == Side::v ? c.matrix_v : c.matrix_k) = random_rotations(1, dim, 17);
    (side == Side::v ? c.center_v : c.center_k) = random_center(dim, 18);
    (side == Side::v ? c.order_k : c.order_v) = 32;
    if (tokens > 2) c.slot_mapping[1] = -1;
    check_rotated(compare_codes(*variant, c, 0x1p-17));
  }
}

TEST_CASE("Transforms of every condition round no more than their two 16-bit split halves do", "[runtime][gpu]") {
  const double condition = GENERATE(1.0, 64.0, 1000.0, 4090.0);
  const bool cancel = GENERATE(false, true), more = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    if (variant->k.exact()) continue;
    CAPTURE(variant->name, condition, cancel, more);
    const int dim = variant->k.head_dim;
    WriteCase c = transformed_case(*variant, condition, cancel, 150, 30);
    if (more) {
      c.center_k = random_center(2 * dim, 31), c.center_v = random_center(dim, 32);
      c.clip_k = {0.96, 1.0}, c.clip_v = {0.9};
    }
    check_rotated(compare_codes(*variant, c, kTransformError));
  }
}

TEST_CASE("Transforms as far as the bound", "[runtime][gpu][emulated]") {
  const double condition = GENERATE(64.0, 4090.0);
  for (const WriteVariant* variant : plain_write_variants()) {
    if (variant->k.exact()) continue;
    CAPTURE(variant->name, condition);
    check_rotated(compare_codes(*variant, transformed_case(*variant, condition, true, 50, 34), kTransformError));
  }
}

TEST_CASE("Transforms with elements that fp16 holds in few digits", "[runtime][gpu][emulated]") {
  for (const WriteVariant* variant : plain_write_variants()) {
    if (variant->k.exact()) continue;
    CAPTURE(variant->name);
    WriteCase c = transformed_case(*variant, 64.0, false, 50, 36);
    for (std::vector<float>* matrix : {&c.matrix_k, &c.matrix_v})
      for (float& x : *matrix) x *= 0x1p-15f;
    check_rotated(compare_codes(*variant, c, kTransformError));
  }
}

TEST_CASE("Scales of channels come before Hadamard blocks of every order, and round nothing", "[runtime][gpu]") {
  const int order = GENERATE(2, 8, 32, 128), spread = GENERATE(2, 5, 11);
  const bool signs = GENERATE(false, true), centers = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    const int dim = variant->k.head_dim;
    if (dim % order != 0 || variant->k.exact()) continue;
    CAPTURE(variant->name, order, spread, signs, centers);
    WriteCase c = random_case(*variant, 160, 2, 64, 40, false);
    c.order_k = order, c.order_v = std::max(1, order / 2);
    c.scale_k = random_scales(2, dim, spread, 41), c.scale_v = random_scales(2, dim, spread, 42);
    unscale(c, dim, variant->bf16);
    std::mt19937 random(43);
    if (signs)
      for (int i = 0; i < 2 * dim; ++i) c.signs.push_back(random() & 1 ? 1 : -1);
    if (centers) c.center_k = random_center(2 * dim, 44), c.center_v = random_center(2 * dim, 45);
    for (std::size_t i = 0; i < c.center_k.size(); ++i) c.center_k[i] /= c.scale_k[i], c.center_v[i] /= c.scale_v[i];
    check_rotated(compare_codes(*variant, c, 0x1p-19));
  }
}

TEST_CASE("Scales of channels with clips, on a few rows", "[runtime][gpu][emulated]") {
  const int spread = GENERATE(3, 11);
  for (const WriteVariant* variant : plain_write_variants()) {
    if (variant->k.exact()) continue;
    CAPTURE(variant->name, spread);
    const int dim = variant->k.head_dim;
    WriteCase c = random_case(*variant, 50, 2, 64, 46, false);
    c.order_k = hadamard_order(dim), c.order_v = 16;
    c.scale_k = random_scales(2, dim, spread, 47), c.scale_v = random_scales(2, dim, spread, 48);
    unscale(c, dim, variant->bf16);
    for (int i = 0; i < 2 * dim; ++i) c.signs.push_back(i % 3 ? 1 : -1);
    c.clip_k = {0.96, 1.0}, c.clip_v = {1.0, 0.9};
    check_rotated(compare_codes(*variant, c, 0x1p-19));
  }
}

TEST_CASE("Scales of channels alone leave rows to be quantized bit by bit as the codec does",
          "[runtime][gpu][emulated]") {
  const bool more = GENERATE(false, true);
  for (const WriteVariant* variant : plain_write_variants()) {
    if (variant->k.exact()) continue;
    CAPTURE(variant->name, more);
    const int dim = variant->k.head_dim;
    WriteCase c = random_case(*variant, 77, 2, 32, 50, false);
    c.scale_k = random_scales(2, dim, 5, 51), c.scale_v = random_scales(2, dim, 24, 52);
    if (!variant->bf16) c.scale_v = random_scales(2, dim, 5, 52);  // because fp16 rounds very small numbers
    if (more) {
      c.center_k = random_center(2 * dim, 53), c.center_v = random_center(2 * dim, 54);
      c.clip_k = {0.96, 1.0}, c.clip_v = {0.9, 0.85};
    }
    CHECK(compare_bytes(*variant, c).where == "");
  }
}

TEST_CASE("Scales that fp16 does not hold are refused", "[runtime][gpu][emulated]") {
  const Rotation far{.channel_scale = {0x1p-20f, 0x1p24f, 1.0f, 1.0f}};
  CHECK_THROWS_WITH(write_factors(far, 4, false), Catch::Contains("from 2^-24 to 2^15 times a head's geometric mean"));
  const WriteFactors factors = write_factors(far, 4, true);
  CHECK(factors.row_scales == std::vector<float>{2.0f});
  CHECK(bf16_to_float(factors.factors[0]) == 0x1p-21f);
}

TEST_CASE("A dense rotation that is a permutation is exact", "[runtime][gpu][emulated]") {
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name);
    const auto dim = static_cast<std::size_t>(variant->k.head_dim);
    WriteCase c = random_case(*variant, 77, 2, 64, 19, true);
    c.matrix_k.assign(dim * dim, 0.0f);
    for (std::size_t i = 0; i < dim; ++i) c.matrix_k[i * dim + (i * 5 + 3) % dim] = i % 3 ? 1.0f : -1.0f;
    if (dim % 5 == 0 || dim % 2 != 0) continue;
    c.matrix_v = c.matrix_k;
    Difference difference = compare_codes(*variant, c, 0x1p-19);
    CHECK(difference.where == "");
    CHECK(difference.other_group_params == 0);
    CHECK(difference.inside == 0);
  }
}
