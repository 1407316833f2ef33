#include "boundaries.h"
#include "coded_write_case.h"
#include "write_case.h"

#include <kvq/codec/golden_rows.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/runtime/golden_pages.h>
#include <kvq/runtime/head_slice.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>

/// Writing of rows in bit tiles and of indices of centroids, byte for byte as RowCodec and page_codec.h store them.
using namespace kvq;
using namespace kvq::test;
using namespace kvq::test::coded;

TEST_CASE("Uniform codes of every width and group in bit tiles", "[runtime][gpu][generic][emulated]") {
  const int bits = GENERATE(1, 2, 3, 4, 5, 6, 7, 8);
  constexpr int kDims[][2] = {{128, 16}, {40, 8}, {72, 72}, {100, 25}, {16, 1}, {80, 40}, {256, 64}, {33, 11}};
  const auto& [dim, group] = kDims[bits - 1];
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(bits, dim, group, i);
    TensorPlan affine = uniform(bits, group, UniformLevels::affine, ScaleRule::minmax, kTypes[i]);
    if (i != 1) std::get<UniformCoder>(affine.coder).zero = ZeroKind::integer;
    if (i == 1) affine.clip_ratio = {0.9, 1.0, 0.5};
    check_plan(affine, dim, i != 2, 10 + static_cast<unsigned>(bits));
    check_plan(uniform(bits, group, UniformLevels::symmetric, kSymmetric[i], kTypes[i]), dim, i != 2, 20);
  }
}

TEST_CASE("Codebooks in bit tiles", "[runtime][gpu][generic][emulated]") {
  const int bits = GENERATE(1, 2, 3, 5, 8);
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(bits, i);
    check_plan(codebooks(bits, i == 0 ? 128 : 32, i == 1, kSearched[i], kTypes[(i + 1) % 3]), 128, i != 2, 30);
  }
}

TEST_CASE("Boundaries of codebook codes are the first channels whose quotients reach a threshold",
          "[runtime][gpu][emulated]") {
  std::mt19937 random(7);
  std::vector<Quotient> all;
  const auto bits_of = [&] { return std::bit_cast<float>(static_cast<std::uint32_t>(random())); };
  const auto scale_of = [&](int i) {  // fp16, or the product of one and a gain
    const float scale = std::ldexp(static_cast<float>(1 + random() % 2047), static_cast<int>(random() % 30) - 24);
    return i % 2 ? scale : scale * std::uniform_real_distribution<float>(0.1f, 4.0f)(random);
  };
  const float least = std::numeric_limits<float>::denorm_min(), most = std::numeric_limits<float>::max();
  for (const float t : {0.0f, -0.0f, least, -least, 2 * least, -2 * least, most, -most, 1.0f, -1.0f, 0.5f, -2.0f,
                        std::nextafter(1.0f, 0.0f), std::nextafter(1.0f, 2.0f), std::nextafter(-1.0f, 0.0f)})
    for (int i = 0; i < 40; ++i) all.push_back({t, i == 0 ? 1.0f : i == 1 ? 65504.0f : scale_of(i)});
  for (int i = 0; i < 20000; ++i)
    all.push_back({std::uniform_real_distribution<float>(-3.0f, 3.0f)(random), scale_of(i)});
  while (all.size() < 24000)
    if (const float t = bits_of(); std::isfinite(t)) all.push_back({t, scale_of(static_cast<int>(all.size()))});
  const std::vector<float> found = boundaries_of(all);
  int wrong = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto [t, d] = all[i];
    // No finite channel reaches a threshold whose boundary is infinite.
    const float last = std::nextafter(found[i], -std::numeric_limits<float>::infinity());
    const bool reaches = found[i] > most || found[i] / d >= t, is_first = last < -most || last / d < t;
    if (reaches && is_first) continue;
    if (wrong++ == 0) UNSCOPED_INFO("threshold " << t << ", scale " << d << ", boundary " << found[i]);
  }
  CHECK(wrong == 0);
}

/// Codebooks of nearly equal steps whose thresholds are quotients of channels of the rows, or the numbers beside them.
TensorPlan edge_codebooks(int bits, const Rows& rows, bool bf16) {
  const int entries = 1 << bits;
  const float step = bits == 2 ? 1.0f : bits == 3 ? 0.6f : 0.33f;
  TensorPlan plan = codebooks(bits, 128, true, ScaleRule::rms, ScaleType::fp16);
  std::vector<float>& table = std::get<CodebookCoder>(plan.coder).tables[bits];
  for (int head = 0; head < kHeads; ++head) {
    std::vector<float> quotients;
    for (std::size_t token = 0; token < static_cast<std::size_t>(rows.tokens); ++token) {
      std::vector<float> x(128), scale(1);
      std::vector<std::uint8_t> codes(128);
      for (std::size_t i = 0; i < 128; ++i)
        x[i] = from_16_bits(rows.k[(token * kHeads + static_cast<std::size_t>(head)) * 128 + i], bf16);
      RowCodec(plan, head, 128).encode(x, codes, scale);
      for (const float channel : x)
        if (const float y = channel / scale[0]; std::isfinite(y)) quotients.push_back(y);
    }
    std::ranges::sort(quotients);
    float* own = table.data() + head * entries;
    own[0] = -0.5f * step * static_cast<float>(entries - 1);
    for (int i = 0; i + 1 < entries; ++i) {
      const float wanted = step * static_cast<float>(i + 1 - entries / 2);
      const auto found = std::ranges::lower_bound(quotients, wanted);
      float threshold = found == quotients.end() ? wanted : *found;
      if (i % 3 > 0) threshold = std::nextafter(threshold, i % 3 == 1 ? -9.0f : 9.0f);
      own[i + 1] = static_cast<float>(2.0 * threshold - own[i]);
    }
  }
  return plan;
}

TEST_CASE("Codebook codes of channels at the edge of two codes", "[runtime][gpu][emulated]") {
  const int bits = GENERATE(2, 3, 4), tokens = 46;
  const bool bf16 = GENERATE(true, false);
  CAPTURE(bits, bf16);
  const LayerPlan shape = layer_of(codebooks(bits, 128, true, ScaleRule::rms, ScaleType::fp16), 128,
                                   codebooks(bits, 128, true, ScaleRule::rms, ScaleType::fp16), 128);
  for (const bool integers : {false, true}) {  // many equal channels, and hard rows
    Rows rows = random_rows(shape, tokens, bf16, 37, integers);
    rows.v = rows.k;
    const TensorPlan plan = edge_codebooks(bits, rows, bf16);
    Target t = target_of(tokens, 32, 0);
    t.chosen = "quantize_write_coded";
    check_write_of(layer_of(plan, 128, plan, 128), t, rows, bf16);
  }
}

TEST_CASE("Codebook codes of one group by their tuned write", "[runtime][gpu][emulated]") {
  const int bits = GENERATE(2, 3, 4);
  const bool bf16 = GENERATE(true, false);
  const ScaleRule rule = bf16 ? ScaleRule::norm : ScaleRule::rms;
  TensorPlan plain = codebooks(bits, 128, bits == 3, rule, ScaleType::fp16);
  if (bf16) {  // symmetric about 0, so that channels of 0 lie on a threshold
    std::vector<float>& all = std::get<CodebookCoder>(plain.coder).tables[bits];
    const std::vector<float> table = all;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = 0.5f * (table[i] - table[i ^ ((1u << bits) - 1)]);
  }
  // Maps that are exact for small integers, in both kernels for rotations.
  const TensorPlan blocks = rotated(plain, 128), dense = permuted(plain, 128);
  const auto check = [&](const TensorPlan& k, const TensorPlan& v, Target t, bool integers) {
    const LayerPlan layer = layer_of(k, 128, v, 128);
    t.chosen = "quantize_write_coded";
    check_write_of(layer, t, random_rows(layer, static_cast<int>(t.slots.size()), bf16, 35, integers), bf16);
  };
  CAPTURE(bits, bf16);
  Target single = target_of(3, 16, 0);
  single.slots = {31, -1, 6}, single.pages = 3;
  Target windows = target_of(24, 32, 0);
  for (int i = 0; i < 24; ++i) windows.window_rows.push_back(i % 3 ? i + 8 : -1);
  for (const TensorPlan& plan : {plain, blocks, dense}) {
    const bool integers = plan.rotation.kind != RotationKind::identity;
    check(plan, plan, target_of(37, 16, 16), integers);
    check(plan, plan, single, integers);
  }
  check(dense, blocks, windows, true);
  // Beside a side of other codes, which the generic kernel writes.
  check(plain, codebooks(5 - bits % 4, 128, false, rule, ScaleType::bf16), target_of(21, 32, 5), false);
  check(mixed(codebooks(8, 0, true, ScaleRule::norm, ScaleType::fp16), 128, some_widths(128), false), plain,
        target_of(21, 32, 5), false);
}

TEST_CASE("Keys of mixed widths with codebook codes by their tuned write", "[runtime][gpu][emulated]") {
  const bool row_scale = GENERATE(false, true), bf16 = GENERATE(true, false);
  const ScaleRule rule = bf16 == row_scale ? ScaleRule::norm : ScaleRule::rms;
  CAPTURE(row_scale, bf16);
  // Ends of the segments of widths 8, 7, ..., 1: short and long ones, at odd channels; one width for the whole row; and
  // channels that are not stored.
  const std::vector<std::vector<std::vector<int>>> widths = {
      {{0, 0, 0, 0, 20, 61, 97, 128}, {0, 0, 0, 0, 1, 18, 83, 128}, {0, 0, 0, 0, 0, 0, 0, 0}},
      {{0, 0, 0, 0, 128, 128, 128, 128}, {0, 0, 0, 0, 0, 127, 128, 128}, {0, 0, 0, 0, 0, 0, 65, 97}}};
  const TensorPlan values = codebooks(3, 128, false, ScaleRule::norm, ScaleType::fp16);
  for (const auto& ends : widths) {
    const TensorPlan plain = mixed(codebooks(4, 0, true, rule, ScaleType::fp16), 128, ends, row_scale);
    const TensorPlan blocks = rotated(plain, 128), dense = permuted(plain, 128);
    const auto check = [&](const TensorPlan& k, Target t, bool integers) {
      const LayerPlan layer = layer_of(k, 128, integers ? rotated(values, 128) : values, 128);
      t.chosen = "quantize_write_coded";
      for (const int multiprocessors : {1, 2, 1000}) {  // few warps for 16 tokens, or one of eight rows; some; eight
        t.multiprocessors = multiprocessors;
        check_write_of(layer, t, random_rows(layer, static_cast<int>(t.slots.size()), bf16, 36, integers), bf16);
      }
    };
    check(plain, target_of(37, 16, 16), false);
    Target single = target_of(3, 16, 0);
    single.slots = {31, -1, 6}, single.pages = 3;
    check(plain, single, false);
    Target windows = target_of(24, 32, 0);
    for (int i = 0; i < 24; ++i) windows.window_rows.push_back(i % 3 ? i + 8 : -1);
    for (const TensorPlan& plan : {blocks, dense}) check(plan, windows, true);
    // So many tokens that one multiprocessor has no warps to spare.
    Target many = target_of(72, 32, 5);
    many.slots[7] = many.slots[40] = -1;
    check(plain, many, false);
    for (int i = 0; i < 72; ++i) many.window_rows.push_back(i % 3 && i < 56 ? i + 8 : -1);
    check(blocks, many, true);
  }
}

TEST_CASE("Trellises in bit tiles", "[runtime][gpu][generic][emulated]") {
  constexpr int kMemories[][2] = {{1, 8}, {2, 1}, {2, 3}, {2, 4}, {3, 2}, {4, 1}};
  const auto& [bits, memory] = kMemories[GENERATE(0, 1, 2, 3, 4, 5)];
  const TrellisSearch search = GENERATE(TrellisSearch::integer, TrellisSearch::binary32);
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(bits, memory, search, i);
    const int group = i == 0 ? 64 : i == 1 ? 8 : 32;
    check_plan(trellis({taps(bits, memory, search)}, bits, group, kSearched[i], kTypes[i]), 64, i != 1, 40);
  }
}

TEST_CASE("Trellises of long groups, which are searched in one run", "[runtime][gpu][generic][emulated]") {
  constexpr int kMemories[][2] = {{1, 8}, {2, 1}, {2, 2}, {2, 3}, {3, 1}, {3, 2}, {4, 1}};
  const auto& [bits, memory] = kMemories[GENERATE(0, 1, 2, 3, 4, 5, 6)];
  for (const int dim : {96, 128}) {
    CAPTURE(bits, memory, dim);
    check_plan(trellis({taps(bits, memory)}, bits, dim, ScaleRule::norm, ScaleType::fp16), dim, dim == 128, 41);
  }
}

TEST_CASE("A trellis of eight bits", "[runtime][gpu][generic]") {
  check_plan(trellis({taps(8, 1)}, 8, 32, kSearched[2], kTypes[2]), 64, true, 40);
}

TEST_CASE("The largest search of a trellis", "[runtime][gpu][generic][emulated]") {
  check_plan(trellis({taps(2, 4)}, 2, 256, ScaleRule::norm, ScaleType::fp16), 256, true, 50);
}

TEST_CASE("Mixed widths, with a scale for each segment or one for the row", "[runtime][gpu][generic][emulated]") {
  const bool row_scale = GENERATE(false, true);
  for (std::size_t i = 0; i < 3; ++i) {
    const int dim = i == 1 ? 96 : 128;
    CAPTURE(row_scale, i);
    const ScaleRule symmetric = row_scale && i == 1 ? ScaleRule::norm : kSymmetric[i];
    check_plan(mixed(uniform(8, 0, UniformLevels::symmetric, symmetric, kTypes[i]), dim, some_widths(dim), row_scale),
               dim, i != 2, 60);
    check_plan(mixed(codebooks(8, 0, i == 1, kSearched[i], kTypes[i]), dim, some_widths(dim), row_scale), dim, i != 2,
               61);
    check_plan(mixed(trellis({taps(1, 3), taps(2, 3), taps(3, 2), taps(4, 1)}, 8, 0, kSearched[i], kTypes[i]), dim,
                     some_widths(dim), row_scale),
               dim, i != 2, 62);
  }
}

TEST_CASE("Mixed widths that all heads share", "[runtime][gpu][generic][emulated]") {
  TensorPlan plan = mixed(trellis({taps(2, 3)}, 8, 0, ScaleRule::norm, ScaleType::fp16), 64,
                          {{0, 0, 0, 0, 0, 9, 60, 64}, {}, {}}, true);
  plan.rotation.scope = Scope::layer;
  plan.allocation->channel_bits.resize(64), plan.allocation->channel_order.resize(64);
  plan.allocation->segment_gain.resize(8);
  std::get<TrellisCoder>(plan.coder).bits = 3;
  check_plan(plan, 64, true, 70);
}

TEST_CASE("Sides of different kinds and head_dims in one write", "[runtime][gpu][generic][emulated]") {
  const TensorPlan bits =
      mixed(trellis({taps(2, 2)}, 8, 0, ScaleRule::norm, ScaleType::fp16), 96, some_widths(96), true);
  const TensorPlan code = uniform(2, 64, UniformLevels::affine, ScaleRule::minmax, ScaleType::bf16);
  const TensorPlan exact;
  for (const bool bf16 : {false, true}) {
    CAPTURE(bf16);
    for (const LayerPlan& layer : {layer_of(bits, 96, code, 128), layer_of(code, 64, bits, 96),
                                   layer_of(exact, 80, bits, 96), layer_of(bits, 96, exact, 16)})
      for (const int multiprocessors : {1, 1000}) {  // 1000: few_rows.h takes the side with bits, and it alone
        Target t = target_of(40, 64, 3);
        t.multiprocessors = multiprocessors;
        check_write_of(layer, t, random_rows(layer, 40, bf16, 80), bf16);
      }
  }
}

TEST_CASE("Few rows of bits behind rotations and beside windows", "[runtime][gpu][generic][emulated]") {
  const bool row_scale = GENERATE(false, true), bf16 = GENERATE(true, false);
  CAPTURE(row_scale, bf16);
  const TensorPlan trellises =
      mixed(trellis({taps(1, 3), taps(2, 3), taps(3, 2), taps(4, 1)}, 8, 0, ScaleRule::norm, ScaleType::fp16), 128,
            some_widths(128), row_scale);
  TensorPlan affine = uniform(3, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  affine.clip_ratio = {0.9, 1.0, 0.5};
  Target t = target_of(24, 32, 0);
  for (int i = 0; i < 24; ++i) t.window_rows.push_back(i % 3 ? i + 8 : -1);
  t.slots[4] = t.slots[9] = t.slots[12] = -1;  // tokens 9 and 12 go nowhere
  for (const int multiprocessors : {20, 1000}) {
    t.multiprocessors = multiprocessors;
    for (LayerPlan layer : {layer_of(rotated(trellises, 128), 128, permuted(trellises, 128), 128),
                            layer_of(permuted(affine, 128), 128, rotated(affine, 128), 128)}) {
      for (int i = 0; i < kHeads * 128; ++i)
        layer.k.center.push_back(static_cast<float>(i % 7) - 2.5f);  // no channel becomes 0, whose sign is not promised
      check_write_of(layer, t, random_rows(layer, 24, bf16, 81, true), bf16);
    }
  }
}

TEST_CASE("Rows are residuals of their nearest centroid", "[runtime][gpu][generic][emulated]") {
  const int count = GENERATE(5, 300);
  const bool joint = GENERATE(false, true);
  const ScaleRule norm = ScaleRule::norm;
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16),
                   bits = mixed(trellis({taps(2, 2)}, 8, 0, norm, ScaleType::fp16), 32, some_widths(32), true);
  CAPTURE(count, joint);
  for (const TensorPlan& plan : {code, bits}) {
    if (joint && count == 300 && !plan.allocation) continue;  // takes long in the emulator
    const TensorPlan side = with_centroids(plan, count, joint, 32);
    check_plan(side, 32, true, 90);
    // Beside windows, which have rows without a centroid; tokens that go to one of both, or to none.
    TensorPlan integers = with_centroids(rotated(plan, 32), count, joint, 32, 6.0f);
    for (float& x : integers.centroids->values) x = std::round(x);
    const LayerPlan layer = layer_of(integers, 32, with_centroids(code, count, joint, 32), 32);
    Target t = target_of(37, 32, 5);
    for (int i = 0; i < 37; ++i) t.window_rows.push_back(i % 3 == 0 ? -1 : 20 + i);
    t.slots[1] = t.slots[2] = t.slots[9] = -1;
    check_write_of(layer, t, random_rows(layer, 37, true, 91, true), true);
  }
}

/// Centroids of which the nearest one is hard to find: equal ones, some that differ by the last bit of a channel, some
/// with zero in their middle.
/// @param with_long  some are beyond the range of fp16, or below its normal numbers, too; then fewer are ruled out by
/// their scores
void make_hard(Centroids& centroids, int dim, bool with_long) {
  const auto d = static_cast<std::size_t>(dim), each = static_cast<std::size_t>(centroids.count) * d;
  for (std::size_t begin = 0; begin < centroids.values.size(); begin += each)
    for (std::size_t c = 1; c < static_cast<std::size_t>(centroids.count); ++c) {
      float *x = centroids.values.data() + begin + c * d, *before = x - d;
      if (c % 16 == 3 || c % 16 == 8) std::copy_n(before, d, x);
      if (c % 16 == 12 && c > 64)  // a lane scores both
        for (std::size_t i = 0; i < d; ++i) x[i] = std::nextafter((x - 64 * d)[i], 9.0f);
      if (c % 16 == 14)  // nearly the same in 16 bits
        for (std::size_t i = 0; i < d; ++i) x[i] = before[i] * (1.0f + 0.001f * std::sin(static_cast<float>(i * c)));
      if (c % 16 == 5) std::copy_n(before, d, x), x[c % d] = std::nextafter(x[c % d], 9.0f);
      if (c % 16 == 7)
        for (std::size_t i = 0; i < d; ++i) x[i] = -before[i];  // zeros lie in the middle
      if (!with_long) continue;
      if (c % 64 == 9) x[0] = 1e5f;
      if (c % 64 == 10)
        for (std::size_t i = 0; i < d; ++i) x[i] *= 1e-7f;
      if (c % 64 == 11) std::fill_n(x, d, 0.0f);
      if (c % 64 == 12) x[d - 1] = 1e30f;
    }
}

struct NearestCase {
  int dim, count;
  bool joint, bf16, many;  ///< many: blocks of 128 rows, else of 16
  bool with_long = count >= 100;
};
void check_nearest(const NearestCase& c) {
  CAPTURE(c.dim, c.count, c.joint, c.bf16, c.many, c.with_long);
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  LayerPlan layer = layer_of(with_centroids(code, c.count, c.joint, c.dim), c.dim,
                             with_centroids(code, c.count, false, c.dim), c.dim);
  make_hard(*layer.k.centroids, c.dim, c.with_long);
  Target t = target_of(141, 32, 5);
  t.slots[7] = t.slots[130] = -1;
  t.multiprocessors = c.many ? 1 : 1000;
  Rows rows = random_rows(layer, 141, c.bf16, 98);
  std::mt19937 random(99);
  std::normal_distribution<float> normal;
  for (std::size_t r = 60; r < 141; ++r) {  // rows near a centroid of each head
    const std::size_t d = static_cast<std::size_t>(c.dim), count = static_cast<std::size_t>(c.count);
    const std::size_t near = r % 2 == 0 && count > 124 ? 92 + 16 * (r % 3) : r * 7 % count;
    for (std::size_t i = 0; i < kHeads * d; ++i) {
      const float x = layer.k.centroids->values[(i / d * static_cast<std::size_t>(c.count) + near) * d + i % d];
      rows.k[r * kHeads * d + i] = to_16_bits(std::clamp(x, -6e4f, 6e4f) + 0.05f * normal(random), c.bf16);
    }
  }
  check_write_of(layer, t, rows, c.bf16);
}

TEST_CASE("Nearest centroids by tensor cores", "[runtime][gpu]") {
  for (const int dim : {64, 128})
    for (const int count : {2, 63, 64, 65, 300, 4096})
      for (const bool joint : {false, true})
        for (const bool bf16 : {false, true})
          for (const bool many : {false, true}) check_nearest({dim, count, joint, bf16, many});
}

TEST_CASE("Some nearest centroids by tensor cores", "[runtime][gpu][emulated]") {
  check_nearest({.dim = 128, .count = 300, .joint = false, .bf16 = true, .many = true});
  check_nearest({.dim = 128, .count = 64, .joint = false, .bf16 = false, .many = false});
  check_nearest({.dim = 64, .count = 63, .joint = true, .bf16 = false, .many = true});
  check_nearest({.dim = 64, .count = 65, .joint = true, .bf16 = true, .many = false});
  check_nearest({.dim = 64, .count = 130, .joint = false, .bf16 = false, .many = false});
  for (const bool many : {false, true})
    check_nearest({.dim = 64, .count = 130, .joint = false, .bf16 = true, .many = many, .with_long = false});
}

TEST_CASE("Keys and values of different head_dims or without centroids have the nearest ones",
          "[runtime][gpu][emulated]") {
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  for (const LayerPlan& layer :
       {layer_of(with_centroids(code, 70, false, 64), 64, with_centroids(code, 5, true, 128), 128),
        layer_of(code, 64, with_centroids(code, 70, false, 128), 128),
        layer_of(with_centroids(code, 70, true, 128), 128, TensorPlan{}, 128),
        layer_of(with_centroids(code, 5, false, 128), 128, with_centroids(code, 5, false, 32), 32)})
    check_write_of(layer, target_of(40, 16, 3), random_rows(layer, 40, true, 99), true);
}

TEST_CASE("Rows with centroids by their tuned write", "[runtime][gpu][emulated]") {
  const bool joint = GENERATE(false, true);
  const TensorPlan code = uniform(4, 128, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  CAPTURE(joint);
  Target t = target_of(141, 32, 5);
  t.chosen = "quantize_write_d128_u4g128i1_u4g128i1";
  t.slots[1] = t.slots[2] = t.slots[9] = -1;
  const LayerPlan layer =
      layer_of(with_centroids(code, 200, joint, 128), 128, with_centroids(code, 256, false, 128), 128);
  check_write_of(layer, t, random_rows(layer, 141, true, 190), true);
  // Beside windows, which have rows without a centroid. The product with the identity turns -0 into +0.
  for (int i = 0; i < 141; ++i) t.window_rows.push_back(i % 3 == 0 || i > 40 ? -1 : i);
  Rows rows = random_rows(layer, 141, true, 191, true);
  for (std::vector<std::uint16_t>* side : {&rows.k, &rows.v}) std::ranges::replace(*side, 0x8000, 0);
  check_write_of(layer, t, rows, true);
}

TEST_CASE("Rotated residuals by their tuned write are the codec's, but for what rotations round",
          "[runtime][gpu][emulated]") {
  constexpr int kDim = 128, kTokens = 48;
  const TensorPlan code = uniform(4, kDim, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
  TensorPlan turned = rotated(code, kDim);
  turned.rotation.order = GENERATE(8, 128);
  LayerPlan plan = layer_of(with_centroids(turned, 200, GENERATE(false, true), kDim), kDim,
                            with_centroids(turned, 40, false, kDim), kDim);
  for (TensorPlan* side : {&plan.k, &*plan.v})
    for (float& x : side->centroids->values) x = from_16_bits(to_16_bits(x, true), true);
  validate(plan);
  const Target t{.page_size = 16,
                 .pages = 3,
                 .slots = target_of(kTokens, 16, 0).slots,
                 .chosen = "quantize_write_d128_u4g128i1_u4g128i1"};
  GoldenTokens tokens{.first = 0, .count = kTokens};
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (auto* rows : {&tokens.q, &tokens.k, &tokens.v})
    for (int i = 0; i < (rows == &tokens.q ? 1 : kTokens) * kHeads * kDim; ++i)
      rows->push_back(to_16_bits(normal(random), true));
  for (std::size_t i = 0; i < 4 * kHeads * kDim; ++i) {  // four tokens are centroids, so that nothing is left of them
    const std::size_t head = i / kDim % kHeads, row = 5 + i / (kHeads * kDim);
    tokens.k[i] = to_16_bits(plan.k.centroids->values[(head * 200 + row) * kDim + i % kDim], true);
  }
  const GoldenRows golden = code_golden_rows(plan, tokens);
  const PageLayout layout = page_layout_of(plan, 16);
  Pools pools;
  pools.pages.assign(static_cast<std::size_t>(t.pages * layout.page_bytes()), std::byte{0xFF});
  pools = written_pools(plan, layout, t, {.tokens = kTokens, .k = tokens.k, .v = tokens.v}, true, pools);
  const PageDifference found = compare_pages(plan, layout, golden, pools.pages);
  CHECK(found.first == "");
  CHECK(found.firm_rows > kTokens * kHeads);
}

TEST_CASE("Centroids that all heads share", "[runtime][gpu][generic][emulated]") {
  TensorPlan plan = uniform(3, 16, UniformLevels::symmetric, ScaleRule::least_squares, ScaleType::fp32);
  plan.rotation.scope = Scope::layer;
  check_plan(with_centroids(plan, 7, GENERATE(false, true), 48), 48, false, 95);
}

TEST_CASE("A rank's heads are coded as the whole plan codes them", "[runtime][gpu][generic][emulated]") {
  const TensorPlan plan = with_centroids(
      mixed(codebooks(8, 0, true, ScaleRule::norm, ScaleType::fp16), 96, some_widths(96), true), 5, false, 96);
  const LayerPlan whole = layer_of(plan, 96, plan, 96);
  for (int head = 0; head < kHeads; ++head) {
    CAPTURE(head);
    const LayerPlan one = slice(whole, {.first_q = head, .num_q = 1, .first_kv = head, .num_kv = 1});
    const Rows rows = random_rows(whole, 8, true, 97);
    for (std::size_t token = 0; token < 8; ++token) {
      std::vector<float> x(96), numbers, expected_numbers;
      const std::size_t first = (token * kHeads + static_cast<std::size_t>(head)) * 96;
      for (std::size_t i = 0; i < 96; ++i) x[i] = from_16_bits(rows.k[first + i], true);
      const RowCodec all(whole.k, head, 96), sliced(one.k, 0, 96);
      std::vector<std::uint8_t> codes(96), expected(96);
      numbers.resize(static_cast<std::size_t>(sliced.num_numbers()));
      expected_numbers.resize(static_cast<std::size_t>(all.num_numbers()));
      REQUIRE(numbers.size() == expected_numbers.size());
      all.encode(x, expected, expected_numbers), sliced.encode(x, codes, numbers);
      CHECK(codes == expected);
      CHECK(std::ranges::equal(numbers, expected_numbers, [](float a, float b) {
        return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
      }));
      CHECK(nearest_centroid(*one.k.centroids, 0, x) == nearest_centroid(*whole.k.centroids, head, x));
    }
  }
  LayerPlan joint = whole;
  joint.v->centroids->joint = true;
  CHECK(joint_fault(whole, 3) == "");
  CHECK(joint_fault(joint, 1) == "");
  CHECK(joint_fault(joint, 3) == "v: joint centroids on 3 ranks: expected 1, because all heads of a token decide");
}

TEST_CASE("Writes of coded rows in small", "[runtime][gpu][sanitizer]") {
  const auto check = [](const TensorPlan& k, const TensorPlan& v, int multiprocessors, std::string_view chosen) {
    const LayerPlan layer = layer_of(k, 128, v, 128);
    Target t = target_of(21, 16, 3);
    for (int i = 0; i < 21; ++i) t.window_rows.push_back(i % 3 ? i + 8 : -1);
    t.slots[7] = -1, t.multiprocessors = multiprocessors, t.chosen = chosen;
    check_write_of(layer, t, random_rows(layer, 21, true, 101, true), true);
  };
  const TensorPlan book = codebooks(3, 128, false, ScaleRule::norm, ScaleType::fp16);
  SECTION("codebooks, mixed widths") {
    const TensorPlan rates =
        mixed(codebooks(4, 0, true, ScaleRule::norm, ScaleType::fp16), 128,
              {{0, 0, 0, 0, 20, 61, 97, 128}, {0, 0, 0, 0, 1, 18, 83, 128}, std::vector<int>(8)}, false);
    for (const int multiprocessors : {1, 2, 1000})
      check(rotated(rates, 128), permuted(book, 128), multiprocessors, "quantize_write_coded");
  }
  SECTION("trellises: a block for each row, and a warp") {
    const TensorPlan rates =
        mixed(trellis({taps(1, 3), taps(2, 3), taps(3, 2)}, 8, 0, ScaleRule::norm, ScaleType::fp16), 128,
              some_widths(128), true);
    for (const int multiprocessors : {1, 1000}) check(rotated(rates, 128), permuted(rates, 128), multiprocessors, "");
  }
  SECTION("nearest centroids by tensor cores") {
    const TensorPlan code = uniform(4, 128, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16);
    check(with_centroids(code, 70, false, 128), with_centroids(code, 300, true, 128), 1, "");
  }
}

TEST_CASE("Golden rows in bit tiles and with indices come out right, and faults are found",
          "[runtime][gpu][generic][emulated]") {
  constexpr int kDim = 64, kTokens = 24;
  const TensorPlan code = uniform(4, 32, UniformLevels::affine, ScaleRule::minmax, ScaleType::fp16),
                   bits = mixed(trellis({taps(2, 2)}, 8, 0, ScaleRule::norm, ScaleType::fp16), kDim, some_widths(kDim),
                                GENERATE(false, true)),
                   wide = uniform(6, 16, UniformLevels::symmetric, ScaleRule::norm, ScaleType::fp16),
                   table = codebooks(3, 16, true, ScaleRule::norm, ScaleType::bf16);
  const auto turned = [&](TensorPlan plan) {
    plan = rotated(std::move(plan), kDim), plan.rotation.order = 32;  // sums that are rounded
    return plan;
  };
  for (const LayerPlan& plan : {layer_of(turned(bits), kDim, turned(with_centroids(code, 5, false, kDim)), kDim),
                                layer_of(turned(with_centroids(bits, 300, true, kDim)), kDim, turned(table), kDim),
                                layer_of(turned(wide), kDim, with_centroids(table, 5, true, kDim), kDim)}) {
    validate(plan);
    const Target t{.page_size = 16, .pages = 2, .slots = target_of(kTokens, 16, 0).slots};
    GoldenTokens tokens{.first = 0, .count = kTokens};
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<std::uint16_t>& rows, int count) {
      for (int i = 0; i < count; ++i) rows.push_back(to_16_bits(normal(random), true));
    };
    fill(tokens.q, kHeads * kDim), fill(tokens.k, kTokens * kHeads * kDim), fill(tokens.v, kTokens * kHeads * kDim);
    const GoldenRows golden = code_golden_rows(plan, tokens);
    const PageLayout layout = page_layout_of(plan, 16);
    Pools pools;
    pools.pages = golden_pages(plan, layout, golden);
    REQUIRE(pools.pages.size() == static_cast<std::size_t>(2 * layout.page_bytes()));
    CHECK(compare_pages(plan, layout, golden, pools.pages).first == "");
    std::fill(pools.pages.begin(), pools.pages.end(), std::byte{0xFF});
    pools = written_pools(plan, layout, t, {.tokens = kTokens, .k = tokens.k, .v = tokens.v}, true, pools);
    PageDifference found = compare_pages(plan, layout, golden, pools.pages);
    CHECK(found.first == "");
    CHECK(found.rows == 2 * kTokens * kHeads);
    CHECK(found.firm_rows > found.rows / 8);
    for (const Side side : kSides) {  // the number of a firm row is damaged, then its index
      const GoldenSide& of = side == Side::v ? golden.v : golden.k;
      int row = 0;
      while (row < 16 * kHeads && !(of.firm[static_cast<std::size_t>(row)] && row % kHeads != 2)) ++row;
      const int head = row % kHeads, slot = row / kHeads;  // mixed rows of head 2 have no numbers
      REQUIRE(slot < 16);
      const TileSide& tile = side == Side::v ? layout.v : layout.k;
      const int first = side == Side::v ? layout.value_tile(head, slot) : layout.key_tile(head, slot);
      for (const int at : {number_offset(tile, slot, 0, 0), tile.index_bytes ? index_offset(tile, slot) : -1}) {
        if (at < 0) continue;
        std::vector<std::byte> damaged = pools.pages;
        damaged[static_cast<std::size_t>(first + at)] ^= std::byte{1};
        found = compare_pages(plan, layout, golden, damaged);
        CHECK(found.firm_faults == 1);
        CHECK(found.soft_faults == 0);
      }
    }
  }
}
