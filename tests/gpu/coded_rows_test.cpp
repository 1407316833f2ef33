#include "coded_cache.h"

#include "support/random_data.h"
#include "support/row_plans.h"

#include <kvq/plan/table_rows.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::test;

namespace {

constexpr int kHeads = 2;

/// Makes the codebook of a width one of levels. @param odd  symmetric about 0
void make_levels(std::vector<float>& table, bool odd) {
  if (odd) {
    for (float& x : table) x = std::abs(x);
    std::sort(table.begin(), table.end());
    for (std::size_t i = 0, n = table.size(); i < n / 2; ++i) table[i] = -table[n - 1 - i];
  }
  table = level_grid(std::vector<double>(table.begin(), table.end()));
}

/// A dense map of each head that is not its own transpose: a reflection, then a shift of channels.
void add_rotation(TensorPlan& plan, int dim, unsigned seed) {
  const int entries = plan.rotation.scope == Scope::kv_head ? kHeads : 1;
  plan.rotation.kind = RotationKind::dense;
  for (int entry = 0; entry < entries; ++entry) {
    const std::vector<float> u = gaussian(static_cast<std::size_t>(dim), seed + static_cast<unsigned>(entry));
    double square = 0.0;
    for (const float x : u) square += double{x} * double{x};
    for (int i = 0; i < dim; ++i)
      for (int j = 0; j < dim; ++j) {
        const int from = (j + 1) % dim;
        plan.rotation.matrix.push_back(
            static_cast<float>((i == from) - 2.0 / square * double{u[static_cast<std::size_t>(i)]} *
                                                 double{u[static_cast<std::size_t>(from)]}));
      }
  }
}

/// A plan for all heads with one width: 0 affine, 1 with zero points, 2 symmetric, 3 codebook, 4 trellis.
TensorPlan plain_plan(int coder, int bits, int group_size, ScaleType type) {
  TensorPlan plan = plain_plans(bits, group_size, type)[static_cast<std::size_t>(coder)];
  plan.rotation.scope = Scope::layer;
  return plan;
}

/// Rows of mixed widths. @param first_heads_widths  widths of head 0, the largest first; head 1 has fewer bits
/// @param coder  0 symmetric, 1 codebook, 2 trellis
TensorPlan widths_plan(std::vector<std::uint8_t> widths, int coder, ScaleType type, bool row_scale, unsigned seed) {
  const std::size_t dim = widths.size();
  std::vector<std::uint8_t> second = widths;
  std::rotate(second.begin(), second.begin() + static_cast<std::ptrdiff_t>(dim / 5), second.end());
  std::fill(second.end() - static_cast<std::ptrdiff_t>(dim / 5), second.end(), std::uint8_t{0});
  widths.insert(widths.end(), second.begin(), second.end());
  TensorPlan plan = mixed_plan(widths, static_cast<int>(dim), coder, type, seed);
  Random random(seed);
  for (int i = 0; row_scale && i < kHeads * kGainWidths; ++i)
    plan.allocation->segment_gain.push_back(static_cast<float>(std::exp(0.5 * random.normal())));
  return plan;
}

std::vector<std::uint8_t> random_widths(int dim, unsigned seed) {
  Random random(seed);
  return descending_widths(random, dim);
}

/// `words` words of bits: codes of 2 bits, then of 1 bit, then none.
std::vector<std::uint8_t> widths_of_words(int words, int dim) {
  const int bits = 32 * words - 5;
  std::vector<std::uint8_t> widths;
  const int most = (bits + dim - 1) / dim;
  for (int c = 0, left = bits; c < dim; ++c) {
    const int width = std::clamp(left, 0, most);
    widths.push_back(static_cast<std::uint8_t>(width)), left -= width;
  }
  return widths;
}

/// Widths of up to 8 bits for 128 channels, in rows of at most 16 words.
std::vector<std::uint8_t> widths_of_16_words(unsigned seed) {
  Random random(seed);
  std::vector<std::uint8_t> widths;
  for (int width = 8, bits = 16 * 32; width > 0; --width) {
    const int left = 128 - static_cast<int>(widths.size()),
              count = std::min({random.integer(0, 30), left, bits / width});
    widths.insert(widths.end(), static_cast<std::size_t>(count), static_cast<std::uint8_t>(width));
    bits -= count * width;
  }
  widths.resize(128);
  return widths;
}

TensorPlan exact_plan() {
  TensorPlan plan;
  plan.rotation.scope = Scope::layer;
  return plan;
}

/// Hadamard blocks with random signs.
void add_hadamard(TensorPlan& plan, int dim, unsigned seed) {
  Random random(seed);
  plan.rotation.kind = RotationKind::block_hadamard, plan.rotation.order = hadamard_order(dim);
  const int entries = plan.rotation.scope == Scope::kv_head ? kHeads : 1;
  for (int i = 0; i < entries * dim; ++i)
    plan.rotation.signs.push_back(static_cast<std::int8_t>(1 - 2 * random.integer(0, 1)));
}

void add_center(TensorPlan& plan, int dim, unsigned seed) {
  plan.center = gaussian(static_cast<std::size_t>((plan.rotation.scope == Scope::kv_head ? kHeads : 1) * dim), seed);
}

/// Trellis codes of 2 bits, each value of which depends on the three codes before it: w8n1.
TensorPlan trellis_plan() {
  TensorPlan plan;
  plan.rotation.scope = Scope::layer;
  plan.coder = TrellisCoder{
      .bits = 2,
      .group_size = 128,
      .taps = {{.bits = 2, .memory = 3, .theta = {0.71f, 1.33f, -0.38f, 0.29f, 0.21f, -0.17f, 0.13f, 0.08f}}},
  };
  return plan;
}

TensorPlan with_centroids(TensorPlan plan, int dim, int count, unsigned seed) {
  add_centroids(plan, dim, count, seed, plan.rotation.scope == Scope::kv_head ? kHeads : 1);
  return plan;
}

/// Properties that take turns from case to case.
void vary(CodedCase& c, int i) {
  constexpr int kPageSizes[] = {16, 32, 64};
  c.page_size = kPageSizes[i % 3], c.heads = 1 + i * 2 % 5, c.bf16 = i % 2 == 0;
  c.lengths = {1, 0, 17, 50 + i % 7};
  if (i % 2) c.sink_tokens = 3, c.recent_tokens = 11 + i % 9;
  c.seed = 900u + static_cast<unsigned>(i);
}

void check_outcome(const CodedOutcome& outcome, double lse_floor = 2e-4) {
  CHECK(outcome.failure == "");
  CHECK(outcome.fault == 0);
  CHECK(outcome.error <= 1.5 * outcome.plain_error + 2e-5);
  CHECK(outcome.lse_error <= lse_floor);
}

/// Prefill rounds rows and weights to 16 bits.
void check_prefill_outcome(const CodedOutcome& outcome) {
  CHECK(outcome.failure == "");
  CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-3);
  CHECK(outcome.lse_error <= 2.0 * outcome.lse_plain_error + 1e-3);
  CHECK(outcome.lse_error <= 1e-2);
}

void check_decode_and_rows(const CodedCase& c) {
  check_outcome(decode_coded(c));
  check_outcome(dequantize_coded(c));
}

/// Linear rows by their tuned kernel.
void check_linear_rows(CodedCase c) {
  c.bits = true;
  check_outcome(dequantize_coded(c));
}

/// Dequantizes by the tuned kernels for bit tiles. Coded rows and the inverse of the rotation are rounded to fp16, and
/// then the result.
void check_coded_rows(CodedCase c) {
  c.bits = true;
  const CodedOutcome outcome = dequantize_coded(c);
  CHECK(outcome.failure == "");
  CHECK(outcome.fault == 0);
  CHECK(outcome.error <= 2.0 * outcome.plain_error + 2e-5);
}

}  // namespace

TEST_CASE("Decode and dequantize rows of one width in bit tiles as the codec does",
          "[runtime][gpu][generic][emulated]") {
  constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};
  int i = 0;
  for (int coder = 0; coder < 5; ++coder)
    for (const int bits : {1, 2, 3, 5, 8}) {
      if (coder == 4 && bits > 4) continue;
      CodedCase c{.k_dim = i % 2 ? 72 : 128, .v_dim = i % 3 ? 40 : 128};
      // The sizes of groups are no multiples of 32, so no code tiles hold these rows.
      c.k = plain_plan(coder, bits, i % 4 < 2 ? 8 : c.k_dim == 72 ? 36 : 64 / 4, kTypes[i % 3]);
      c.v = plain_plan((coder + i) % 4, 1 + i * 3 % 8, i % 2 ? c.v_dim / 2 : 8, kTypes[i / 3 % 3]);
      vary(c, i);
      CAPTURE(coder, bits, i);
      check_decode_and_rows(c);
      ++i;
    }
}

TEST_CASE("Decode and dequantize short rows of mixed widths with scales of either scope",
          "[runtime][gpu][generic][emulated]") {
  int i = 0;
  for (int coder = 0; coder < 3; ++coder)
    for (const bool row_scale : {false, true}) {
      CodedCase c{.k_dim = 64, .v_dim = 40};
      const auto seed = static_cast<unsigned>(900 + i);
      c.k = widths_plan(random_widths(c.k_dim, seed), coder, ScaleType::fp16, row_scale, seed);
      c.v = widths_plan(random_widths(c.v_dim, seed + 50), (coder + 1) % 3, ScaleType::bf16, !row_scale, seed);
      vary(c, i++);
      CAPTURE(coder, row_scale);
      check_decode_and_rows(c);
    }
}

TEST_CASE("Decode and dequantize rows of mixed widths with scales of either scope", "[runtime][gpu][generic]") {
  constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};
  int i = 0;
  for (int coder = 0; coder < 3; ++coder)
    for (const bool row_scale : {false, true})
      for (int turn = 0; turn < 4; ++turn, ++i) {
        CodedCase c{.k_dim = turn == 3 ? 256 : 128, .v_dim = turn == 2 ? 96 : 64};
        const auto seed = static_cast<unsigned>(1000 + i);
        c.k = widths_plan(random_widths(c.k_dim, seed), coder, kTypes[i % 3], row_scale, seed);
        c.v = widths_plan(random_widths(c.v_dim, seed + 50), (coder + turn) % 3, kTypes[i / 3 % 3],
                          row_scale != (turn == 1), seed);
        vary(c, i);
        CAPTURE(coder, row_scale, turn);
        check_decode_and_rows(c);
      }
}

TEST_CASE("Decode and dequantize rows of every number of words", "[runtime][gpu][generic][emulated]") {
  for (int words = 1; words <= 20; ++words) {
    CodedCase c{.k_dim = 128, .v_dim = 120};
    c.k = widths_plan(widths_of_words(words, c.k_dim), words % 3, ScaleType::fp16, words % 2 == 0, 1100);
    c.v = widths_plan(widths_of_words(21 - words, c.v_dim), (words + 1) % 3, ScaleType::fp16, words % 2 == 1, 1101);
    vary(c, words);
    c.lengths = {33};
    CAPTURE(words);
    check_decode_and_rows(c);
  }
}

TEST_CASE("Rows with centroids in bit tiles and in code tiles", "[runtime][gpu][generic][emulated]") {
  int i = 0;
  for (const int count : {5, 300})
    for (const bool rotated : {false, true})
      for (int tiles = 0; tiles < 4; ++tiles, ++i) {
        CodedCase c{.k_dim = 128, .v_dim = 128};
        const TensorPlan codes = plain_plan(0, 4, 128, ScaleType::fp16), twos = plain_plan(2, 2, 32, ScaleType::bf16),
                         bits = widths_plan(random_widths(128, 1200u + static_cast<unsigned>(i)), i % 3,
                                            ScaleType::fp16, i % 2 == 0, 1201);
        c.k = tiles == 0 ? codes : tiles == 1 ? twos : tiles == 2 ? bits : codes;
        c.v = tiles == 0 ? codes : tiles == 1 ? plain_plan(0, 3, 64, ScaleType::fp16) : bits;
        if (rotated) add_rotation(c.k, 128, 1202), add_rotation(c.v, 128, 1203);
        c.k = with_centroids(c.k, 128, count, 1204);
        if (tiles != 3) c.v = with_centroids(c.v, 128, count, 1205);
        vary(c, i);
        CAPTURE(count, rotated, tiles);
        check_decode_and_rows(c);
      }
}

TEST_CASE("Decode of bit tiles beside exact rows and code tiles", "[runtime][gpu][generic][emulated]") {
  const TensorPlan bits = widths_plan(random_widths(128, 1300), 2, ScaleType::fp16, true, 1300);
  const TensorPlan others[] = {exact_plan(), plain_plan(0, 2, 64, ScaleType::fp16),
                               plain_plan(2, 3, 128, ScaleType::fp32)};
  int i = 0;
  for (const TensorPlan& other : others)
    for (const bool swapped : {false, true}) {
      CodedCase c{.k = swapped ? other : bits, .v = swapped ? bits : other, .k_dim = 128, .v_dim = 128};
      vary(c, i++);
      CAPTURE(i);
      check_decode_and_rows(c);
    }
}

TEST_CASE("Decode of coded rows: several tokens, masks, ranges, capped scores, learned sinks",
          "[runtime][gpu][generic][emulated]") {
  CodedCase c{.k_dim = 64, .v_dim = 128};
  c.k = widths_plan(random_widths(64, 1400), 1, ScaleType::fp16, true, 1400);
  c.v = with_centroids(widths_plan(random_widths(128, 1401), 2, ScaleType::fp16, false, 1401), 128, 5, 1402);
  c.lengths = {40, 5, 0, 90}, c.heads = 5, c.sink_tokens = 4, c.recent_tokens = 20;
  c.new_tokens = {4, 5, 0, 16};
  SECTION("causal") { c.sink_logits = true; }
  SECTION("masks") { c.masks = true, c.softcap = 2.0f; }
  SECTION("a sliding window") { c.sliding_window = 30, c.softcap = 3.0f, c.sink_logits = true; }
  SECTION("ranges") { c.first = {0, 2, 0, 17}, c.last = {37, 5, 0, 81}, c.sink_logits = true; }
  check_outcome(decode_coded(c));
}

TEST_CASE("Decode of long sequences of coded rows", "[runtime][gpu][generic]") {
  CodedCase c{.k_dim = 64, .v_dim = 128, .num_kv_heads = 1};
  c.k = widths_plan(random_widths(64, 1400), 1, ScaleType::fp16, true, 1400);
  c.v = with_centroids(widths_plan(random_widths(128, 1401), 2, ScaleType::fp16, false, 1401), 128, 5, 1402);
  c.lengths = {700, 3, 330}, c.heads = 2, c.sink_tokens = 4, c.recent_tokens = 20;
  check_outcome(decode_coded(c));
}

TEST_CASE("Poisoned rows and lost pages show as NaN", "[runtime][gpu][generic][emulated]") {
  for (int coder = 0; coder < 4; ++coder) {
    CAPTURE(coder);
    CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {40, 20}, .poisoned = 19};
    std::vector<std::uint8_t> widths = widths_of_words(3, 128);  // channels of width 0, too
    c.k = coder == 3 ? with_centroids(plain_plan(0, 4, 128, ScaleType::fp16), 128, 5, 1500)
                     : widths_plan(widths, coder, ScaleType::fp16, coder == 1, 1500);
    c.v = coder == 3 ? c.k : widths_plan(widths, coder, ScaleType::fp16, coder != 1, 1501);
    check_decode_and_rows(c);
    c.poisoned = -1, c.lost = 1;
    const CodedOutcome lost = decode_coded(c);
    CHECK(lost.failure == "");
    CHECK(lost.fault == static_cast<int>(FaultCode::page));
  }
}

TEST_CASE("Rows of as many bytes as there may be", "[runtime][gpu][generic][emulated]") {
  CodedCase c{.num_kv_heads = 1, .heads = 2, .lengths = {37}, .sink_tokens = 2, .recent_tokens = 5};
  c.k_dim = c.v_dim = 256;
  c.k = plain_plan(0, 8, GENERATE(1, 8), ScaleType::fp32);
  c.v = plain_plan(3, 8, 4, ScaleType::fp32);
  check_decode_and_rows(c);
}

TEST_CASE("Prefill over coded rows", "[runtime][gpu][generic][emulated]") {
  CodedCase c{.k_dim = 128, .v_dim = 64, .lengths = {45, 0, 17}, .sink_tokens = 4, .recent_tokens = 10};
  c.k = with_centroids(widths_plan(random_widths(128, 1600), 2, ScaleType::fp16, true, 1600), 128, 300, 1601);
  c.v = widths_plan(random_widths(64, 1602), 1, ScaleType::bf16, false, 1602);
  add_rotation(c.k, 128, 1603);
  c.k.centroids->after_rotation = true;
  check_prefill_outcome(prefill_coded(c, {9, 20, 3}));
}

TEST_CASE("Linear rows of every number of words", "[runtime][gpu][emulated]") {
  constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};
  for (int words = 1; words <= 16; ++words) {
    CodedCase c{.k_dim = 128, .v_dim = 128};
    const auto plan = [&](int of, int turn) {
      const auto seed = static_cast<unsigned>(1700 + of);
      TensorPlan made = widths_plan(widths_of_words(of, 128), of % 2 == 0 ? 2 : 0, kTypes[turn % 3], true, seed);
      if (turn % 4 == 1) add_rotation(made, 128, seed);
      if (turn % 4 == 2) add_hadamard(made, 128, seed);
      if (turn % 2 == 0) add_center(made, 128, seed);
      return made;
    };
    c.k = plan(words, words), c.v = plan(17 - words, words + 1);
    vary(c, words);
    c.lengths = {70, 0, 33};
    CAPTURE(words);
    check_linear_rows(c);
  }
}

TEST_CASE("Linear rows: rotations, windows, parts of sequences", "[runtime][gpu][emulated]") {
  const int rotation = GENERATE(0, 1, 2, 3);
  CodedCase c{.k = trellis_plan(), .v = trellis_plan(), .k_dim = 128, .v_dim = 128, .page_size = 16};
  for (TensorPlan* plan : {&c.k, &c.v}) {
    if (rotation == 1) add_rotation(*plan, 128, 1800);
    if (rotation >= 2) add_hadamard(*plan, 128, 1801);
    if (rotation == 3)
      for (const float x : gaussian(128, 1802)) plan->rotation.channel_scale.push_back(std::exp2(std::round(3.0f * x)));
    add_center(*plan, 128, 1803);
  }
  c.lengths = {90, 1, 0, 40, 5}, c.sink_tokens = 3, c.recent_tokens = 37, c.bf16 = rotation % 2 == 0;
  check_linear_rows(c);
  c.first = {35, 0, 0, 2, 4}, c.last = {80, 1, 0, 21, 4};
  check_linear_rows(c);
}

TEST_CASE("Linear rows of mixed widths, one of heads without bits", "[runtime][gpu][emulated]") {
  CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {33, 50}};
  c.k = widths_plan(widths_of_words(7, 128), 2, ScaleType::fp16, true, 1900);
  c.v = widths_plan(widths_of_words(10, 128), 0, ScaleType::fp16, true, 1901);
  auto& widths = c.k.allocation->channel_bits;
  std::fill(widths.begin() + 128, widths.end(), std::uint8_t{0});
  check_linear_rows(c);
  c.poisoned = 19;
  check_linear_rows(c);
  c.poisoned = -1, c.lost = 1, c.bits = true;
  CHECK(dequantize_coded(c).fault == static_cast<int>(FaultCode::page));
}

TEST_CASE("Coded rows of all widths and scales by their tuned kernel", "[runtime][gpu][emulated]") {
  constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};
  int i = 0;
  for (const bool row_scale : {false, true})
    for (int turn = 0; turn < 6; ++turn, ++i) {
      CodedCase c{.k_dim = 128, .v_dim = 128};
      const auto plan = [&](int which) {
        const auto seed = static_cast<unsigned>(2000 + 10 * i + which);
        const std::vector<std::uint8_t> widths =
            turn < 3 ? widths_of_16_words(seed)
                     : std::vector<std::uint8_t>(128, static_cast<std::uint8_t>(turn + which - 2));
        TensorPlan made = widths_plan(widths, (turn + which) % 2, kTypes[(turn + which) % 3], row_scale, seed);
        if ((turn + which) % 3 == 0) add_rotation(made, 128, seed);
        if ((turn + which) % 3 == 1) add_hadamard(made, 128, seed);
        if (which) add_center(made, 128, seed);
        return made;
      };
      c.k = plan(0), c.v = plan(1);
      vary(c, i);
      c.lengths = {70, 0, 33, 1};
      CAPTURE(row_scale, turn);
      check_coded_rows(c);
    }
}

TEST_CASE("Coded rows beside linear rows, windows, parts of sequences", "[runtime][gpu][emulated]") {
  CodedCase c{.k_dim = 128, .v_dim = 128, .page_size = 16};
  const TensorPlan coded = widths_plan(widths_of_words(12, 128), 1, ScaleType::fp16, false, 2200);
  c.k = coded, c.v = trellis_plan();
  SECTION("keys are coded") {}
  SECTION("values are coded") { std::swap(c.k, c.v); }
  SECTION("both are") { c.v = widths_plan(widths_of_words(5, 128), 0, ScaleType::bf16, true, 2201); }
  SECTION("groups have scales of their own") { c.v = plain_plan(3, 3, 16, ScaleType::fp32); }
  add_rotation(c.k, 128, 2202), add_hadamard(c.v, 128, 2203), add_center(c.v, 128, 2204);
  c.lengths = {90, 1, 0, 40, 5}, c.sink_tokens = 3, c.recent_tokens = 37;
  check_coded_rows(c);
  c.first = {35, 0, 0, 2, 4}, c.last = {80, 1, 0, 21, 4}, c.bf16 = false;
  check_coded_rows(c);
  c.first = c.last = {}, c.poisoned = 19;
  check_coded_rows(c);
  c.poisoned = -1, c.lost = 0, c.bits = true;
  CHECK(dequantize_coded(c).fault == static_cast<int>(FaultCode::page));
}

TEST_CASE("Prefill over coded rows by tuned kernels", "[runtime][gpu][emulated]") {
  CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {45, 0, 17}, .sink_tokens = 4, .recent_tokens = 10};
  c.k = widths_plan(widths_of_words(12, 128), 1, ScaleType::fp16, false, 2300);
  c.v = plain_plan(3, 3, 128, ScaleType::fp16), c.bits = true;
  add_rotation(c.k, 128, 2301);
  check_prefill_outcome(prefill_coded(c, {9, 20, 3}));
}

TEST_CASE("Rows with centroids by their tuned kernel", "[runtime][gpu][emulated]") {
  // With large centroids, scores of some tokens are far above those of all tokens before.
  const float size = GENERATE(1.0f, 12.0f);
  for (int i = 0; i < 4; ++i) {
    constexpr int kCounts[] = {256, 1, 19, 200};
    CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {90, 1, 0, 40, 5}, .tuned = true};
    c.k = plain_plan(0, 4, 128, ScaleType::fp16), c.v = plain_plan(0, 4, 128, ScaleType::fp16);
    for (TensorPlan* plan : {&c.k, &c.v}) {
      if (i == 1) add_rotation(*plan, 128, 1851);
      if (i == 2) plan->rotation.scope = Scope::kv_head, plan->clip_ratio.clear();
      if (i >= 2) add_hadamard(*plan, 128, 1852);
      if (i == 3) add_center(*plan, 128, 1853);
    }
    c.k = with_centroids(c.k, 128, kCounts[i], 1854), c.v = with_centroids(c.v, 128, kCounts[(i + 1) % 4], 1855);
    for (float& x : c.k.centroids->values) x *= size;
    if (i > 0) c.sink_tokens = 3, c.recent_tokens = 11;
    if (i == 3) c.lengths = {700, 260}, c.new_tokens = {3, 1}, c.heads = 5;
    c.sink_logits = i == 2, c.softcap = i == 1 ? 20.0f : 0.0f;
    c.seed = 1856u + static_cast<unsigned>(i);
    CAPTURE(size, i);
    check_outcome(decode_coded(c), 2e-3);
    c.poisoned = 19;
    check_outcome(decode_coded(c), 2e-3);
  }
}

TEST_CASE("Codebook codes by their tuned kernel", "[runtime][gpu][emulated]") {
  const int bits = GENERATE(3, 4);
  for (int rotation = 0; rotation < 3; ++rotation) {
    CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {90, 1, 0, 40, 5}, .tuned = true};
    for (const bool value : {false, true}) {
      // Another codebook for each side, and for each head.
      TensorPlan& plan = value ? c.v : c.k;
      plan = plain_plan(3, bits, 128, ScaleType::fp16);
      auto& coder = std::get<CodebookCoder>(plan.coder);
      std::vector<float>& table = coder.tables.at(bits);
      make_levels(table, true);
      if (value)
        for (float& x : table) x *= 0.75f;
      if (rotation == 2) {
        plan.rotation.scope = Scope::kv_head, coder.per_head = true;
        std::vector<float> other = table;
        for (float& x : other) x *= std::abs(x);
        make_levels(other, true);
        table.insert(table.end(), other.begin(), other.end());
        add_hadamard(plan, 128, 1811);
      }
      if (rotation == 1) add_rotation(plan, 128, 1812);
      add_center(plan, 128, 1813);
    }
    if (rotation > 0) c.sink_tokens = 3, c.recent_tokens = 11;
    if (rotation > 0 && bits == 3) c.heads = rotation == 1 ? 8 : 7;  // eight rows
    c.sink_logits = rotation == 2, c.softcap = rotation == 1 ? 20.0f : 0.0f;
    c.seed = 1820u + static_cast<unsigned>(rotation);
    CAPTURE(bits, rotation);
    check_outcome(decode_coded(c), 2e-3);
    c.poisoned = 19;
    check_outcome(decode_coded(c), 2e-3);
  }
}

TEST_CASE("Codebook codes of mixed widths by their tuned kernel", "[runtime][gpu][emulated]") {
  const int bits = GENERATE(2, 3);
  for (int rotation = 0; rotation < 3; ++rotation) {
    CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {90, 1, 0, 40, 5}, .tuned = true};
    c.v = plain_plan(3, bits, 128, ScaleType::fp16);
    make_levels(std::get<CodebookCoder>(c.v.coder).tables.at(bits), true);
    // Head 0: 20, 88 and 20 channels of one bit more than the mean, of the mean and of one bit less. Head 1: the mean
    // for all.
    const auto mean = static_cast<std::uint8_t>(bits);
    std::vector<std::uint8_t> widths(20, static_cast<std::uint8_t>(bits + 1));
    widths.resize(108, mean), widths.resize(128, static_cast<std::uint8_t>(bits - 1));
    widths.resize(256, mean);
    c.k = mixed_plan(widths, 128, 1, ScaleType::fp16, 1830);
    // Levels of keys need not be symmetric.
    for (auto& [width, table] : std::get<CodebookCoder>(c.k.coder).tables) make_levels(table, rotation != 1);
    if (rotation == 1) add_rotation(c.k, 128, 1831), add_rotation(c.v, 128, 1832);
    if (rotation == 2) add_hadamard(c.k, 128, 1833), add_center(c.v, 128, 1834);
    if (rotation > 0) c.sink_tokens = 3, c.recent_tokens = 11;
    if (rotation > 0) c.heads = rotation == 1 ? 8 : 5;  // eight rows
    c.sink_logits = rotation == 2, c.softcap = rotation == 1 ? 20.0f : 0.0f;
    c.seed = 1840u + static_cast<unsigned>(rotation);
    CAPTURE(bits, rotation);
    check_outcome(decode_coded(c), 4e-3);
    c.poisoned = 19;
    check_outcome(decode_coded(c), 4e-3);
  }
}

TEST_CASE("Prefill over linear rows", "[runtime][gpu][emulated]") {
  CodedCase c{.k = trellis_plan(), .v = trellis_plan(), .k_dim = 128, .v_dim = 128, .lengths = {145, 0, 17}};
  c.bits = true;
  std::vector<int> chunks = {9, 20, 3};
  SECTION("windows, a center") {
    c.sink_tokens = 4, c.recent_tokens = 30;
    add_rotation(c.k, 128, 2000), add_hadamard(c.v, 128, 2001), add_center(c.k, 128, 2002);
  }
  SECTION("a sliding window, mixed widths") {
    c.k = widths_plan(widths_of_words(7, 128), 2, ScaleType::fp16, true, 2003);
    c.v = widths_plan(widths_of_words(10, 128), 2, ScaleType::fp16, true, 2004);
    c.sliding_window = 50;
  }
  check_prefill_outcome(prefill_coded(c, chunks));
}

TEST_CASE("Coded rows in small: tuned decode, dequantizing, prefill", "[runtime][gpu][sanitizer]") {
  CodedCase c{.k_dim = 128, .v_dim = 128, .lengths = {70, 0, 33}, .sink_tokens = 3, .recent_tokens = 11};
  SECTION("trellis codes") { c.k = trellis_plan(), c.v = trellis_plan(); }
  SECTION("codebooks of mixed widths") {
    std::vector<std::uint8_t> widths(20, std::uint8_t{4});
    widths.resize(108, std::uint8_t{3}), widths.resize(128, std::uint8_t{2}), widths.resize(256, std::uint8_t{3});
    c.k = mixed_plan(widths, 128, 1, ScaleType::fp16, 2400), c.v = plain_plan(3, 3, 128, ScaleType::fp16);
    for (TensorPlan* plan : {&c.k, &c.v})
      for (auto& [width, table] : std::get<CodebookCoder>(plan->coder).tables) make_levels(table, true);
  }
  SECTION("centroids") {
    c.k = with_centroids(plain_plan(0, 4, 128, ScaleType::fp16), 128, 19, 2401);
    c.v = with_centroids(plain_plan(0, 4, 128, ScaleType::fp16), 128, 200, 2402);
  }
  add_rotation(c.k, 128, 2403), add_hadamard(c.v, 128, 2404);
  c.tuned = true;
  check_outcome(decode_coded(c), 4e-3);
  if (c.k.centroids) return;
  c.tuned = false, c.bits = true;
  check_coded_rows(c);
  c.bf16 = false;
  check_prefill_outcome(prefill_coded(c, {9, 20, 3}));
}
