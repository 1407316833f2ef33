#include "cache_case.h"
#include "decode_case.h"
#include "generic_formats.h"
#include "write_compare.h"

#include <kvq/runtime/kernels/prefill/variant.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <random>

using namespace kvq;
using namespace kvq::test;

namespace {

constexpr CaseRotation kRotations[] = {CaseRotation::none, CaseRotation::hadamard, CaseRotation::dense,
                                       CaseRotation::scaled, CaseRotation::transform};
constexpr ScaleRule kRules[] = {ScaleRule::norm, ScaleRule::absmax, ScaleRule::least_squares};
constexpr int kPageSizes[] = {16, 32, 64};

/// Calls check() for every format with its number, which selects the other properties of a case in turn.
template <typename Check>
void for_each_format(Check check) {
  int i = 0;
  for (const GenericFormat& format : generic_formats()) {
    CAPTURE(format.name, i);
    check(format, i++);
  }
}

DecodeCase decode_case(const GenericFormat& format, int i) {
  return {
      .num_kv_heads = 1 + i % 3,
      .heads = format.heads,
      .page_size = kPageSizes[i % 3],
      .lengths = {1, 0, 17, 63, 64, 65, 300},
      .rotation = kRotations[i / 2 % 5],
      .centers = i % 4 < 2,
      .indptr = i % 2 == 1,
      .seed = 100u + static_cast<unsigned>(i),
  };
}

void check_decode_case(const GenericFormat& format, const DecodeCase& c) {
  const DecodeOutcome outcome = run_decode_case(format.decode(), c);
  CHECK(outcome.failure == "");
  CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  CHECK(outcome.lse_error <= 2.0 * outcome.lse_plain_error + 1e-4);
}

int hadamard_of(int head_dim, int i) { return std::max(1, (head_dim & -head_dim) >> (i % 3)); }

/// Householder reflections. @return  [count, D, D]
std::vector<float> reflections(int count, int dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<float> all;
  for (int m = 0; m < count; ++m) {
    std::vector<double> u(static_cast<std::size_t>(dim));
    double square = 0.0;
    for (double& x : u) x = normal(random), square += x * x;
    for (std::size_t i = 0; i < u.size(); ++i)
      for (std::size_t j = 0; j < u.size(); ++j)
        all.push_back(static_cast<float>((i == j ? 1.0 : 0.0) - 2.0 / square * u[i] * u[j]));
  }
  return all;
}

void check_cache(const CacheOutcome& outcome, double lse_floor = 1e-4) {
  CHECK(outcome.failure == "");
  CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  CHECK(outcome.lse_error <= 2.0 * outcome.lse_plain_error + lse_floor);
}

/// All verbs, in small.
void check_small(const GenericFormat& format, int i) {
  DecodeCase decode = decode_case(format, i);
  decode.lengths = {90, 0, 17}, decode.sink_tokens = 4, decode.recent_tokens = 20;
  check_decode_case(format, decode);
  decode.new_tokens = {3, 0, 2}, decode.masks = i % 2 == 1, decode.softcap = i % 2 ? 0.0f : 2.0f;
  check_decode_case(format, decode);
  const WriteVariant variant = format.write();
  WriteCase write = random_case(variant, 21, 2, 16, 700, true);
  write.rule_k = rule_of(variant.k, kRules[i % 3]), write.rule_v = rule_of(variant.v, kRules[i / 2 % 3]);
  if (i % 2) write.clip_k = {0.96, 1.0}, write.clip_v = {0.9, 0.85};
  CHECK(compare_bytes(variant, write).where == "");
  const CacheCase cache{
      .page_size = 32,
      .lengths = {70, 0},
      .sink_tokens = 4,
      .recent_tokens = 20,
      .rotation = kRotations[i % 5],
      .seed = 701,
  };
  check_cache(run_dequantize_case(format.dequantize(), cache, {}));
  check_cache(run_prefill_case(format.dequantize(), cache, {.heads = 3, .chunks = {9, 3}, .generic = true}), 1e-3);
}

}  // namespace

TEST_CASE("Generic decode of every format, over codes alone", "[runtime][gpu][generic]") {
  for_each_format([](const GenericFormat& format, int i) { check_decode_case(format, decode_case(format, i)); });
}

TEST_CASE("Generic decode of every format, with windows whose borders fall anywhere", "[runtime][gpu][generic]") {
  constexpr int kSinks[] = {0, 1, 16, 37}, kRecent[] = {31, 0, 1, 100, 16};
  for_each_format([&](const GenericFormat& format, int i) {
    DecodeCase c = decode_case(format, i + 1);
    c.sink_tokens = kSinks[i % 4], c.recent_tokens = kRecent[i % 5];
    if (i % 3 == 0) c.sliding_window = 1 + i * 11 % 200;
    check_decode_case(format, c);
  });
}

TEST_CASE("Generic decode replays with other lengths, empty ones too", "[runtime][gpu][generic]") {
  for_each_format([](const GenericFormat& format, int i) {
    if (i % 4 != 0) return;
    DecodeCase c = decode_case(format, i);
    c.lengths = {700, 130, 64}, c.replay = i % 8 ? std::vector<int>{130, 0, 33} : std::vector<int>{0, 0, 0};
    c.sink_tokens = 8, c.recent_tokens = 40;
    check_decode_case(format, c);
    c = decode_case(format, i), c.lengths = {};
    CHECK(run_decode_case(format.decode(), c).failure == "");
  });
}

TEST_CASE("Generic decode of several new tokens, ranges and capped scores", "[runtime][gpu][generic]") {
  for_each_format([&](const GenericFormat& format, int i) {
    DecodeCase c = decode_case(format, i + 2);
    c.lengths = {100, 641, 5, 0, 30, 16}, c.new_tokens = {4, 1, 5, 0, 2, 16};
    c.masks = i % 2 == 1, c.sliding_window = i % 3 ? 0 : 50;
    c.softcap = i % 2 ? 3.0f : 0.0f;
    if (i % 4 == 1) c.first = {0, 600, 2, 0, 29, 3}, c.last = {99, 700, 5, 5, 29, 14};
    c.sink_tokens = i % 5 ? 4 : 0, c.recent_tokens = i % 5 == 1 ? 0 : 20;
    check_decode_case(format, c);
  });
}

TEST_CASE("Generic decode divides long sequences among blocks", "[runtime][gpu][generic][slow]") {
  for_each_format([](const GenericFormat& format, int i) {
    if (i % 12 != 0) return;
    DecodeCase c = decode_case(format, i);
    c.num_kv_heads = 2, c.lengths = {9000, 3, 0, 4099}, c.sink_tokens = 64, c.recent_tokens = 256;
    c.sharpness = i % 24 ? 10.0f : 1.0f, c.centers = true, c.sink_level = i % 24 ? 300.0f : -300.0f;
    check_decode_case(format, c);
  });
}

TEST_CASE("Generic writing codes unrotated rows bit by bit as the codec does", "[runtime][gpu][generic]") {
  for_each_format([](const GenericFormat& format, int i) {
    const WriteVariant variant = format.write();
    WriteCase c = random_case(variant, 96 + i % 17, 3, kPageSizes[i % 3], 200u + static_cast<unsigned>(i), true);
    c.rule_k = rule_of(variant.k, kRules[i % 3]), c.rule_v = rule_of(variant.v, kRules[i / 3 % 3]);
    if (i % 2) c.clip_k = {0.96, 1.0, 0.5}, c.clip_v = {0.999, 0.85, 0.01};
    CHECK(compare_bytes(variant, c).where == "");
    // Tokens go to random slots, and one to none.
    std::shuffle(c.slot_mapping.begin(), c.slot_mapping.end(), std::mt19937(static_cast<unsigned>(i)));
    c.slot_mapping[1] = -1;
    if (i % 2 == 0)
      for (const TileSide* side : {&variant.k, &variant.v}) {
        std::vector<float>& center = side == &variant.k ? c.center_k : c.center_v;
        for (int j = 0; j < 3 * side->head_dim; ++j) center.push_back(static_cast<float>(j * 37 % 100) / 64.0f - 0.7f);
      }
    CHECK(compare_bytes(variant, c).where == "");
  });
}

TEST_CASE("Generic writing rotates", "[runtime][gpu][generic]") {
  const bool dense = GENERATE(false, true);
  for_each_format([&](const GenericFormat& format, int i) {
    CAPTURE(dense);
    const WriteVariant variant = format.write();
    const int k_dim = variant.k.head_dim, v_dim = variant.v.head_dim;
    if (dense && (k_dim % 32 || v_dim % 32)) return;  // rotations are packed by 32 channels
    WriteCase c = random_case(variant, 130, 2, 64, 300u + static_cast<unsigned>(i), false);
    if (dense) {
      const int count = 1 + i % 2;
      c.matrix_k = reflections(count, k_dim, 301), c.matrix_v = reflections(count, v_dim, 302);
    } else {
      c.order_k = hadamard_of(k_dim, i), c.order_v = hadamard_of(v_dim, i / 3);
      std::mt19937 random(303);
      if (i % 3)
        for (int j = 0; j < 2 * std::max(k_dim, v_dim); ++j) c.signs.push_back(random() & 1 ? 1 : -1);
    }
    if (i % 2 && !dense)
      for (int j = 0; j < 2 * k_dim; ++j) c.center_k.push_back(static_cast<float>(j * 37 % 100) / 64.0f - 0.7f);
    // A row that is clipped at both ends has a zero point half way between two integers: rounding decides.
    if (i % 5 < 2 && !variant.k.integer_zero && !variant.v.integer_zero)
      c.clip_k = c.clip_v = std::vector<double>(dense ? static_cast<std::size_t>(1 + i % 2) : 2, 0.96);
    const Difference difference = compare_codes(variant, c, dense ? 0x1p-17 : 0x1p-19);
    CHECK(difference.where == "");
    CHECK(difference.far == 0);
    CHECK(difference.inside == 0);
    CHECK(static_cast<double>(difference.differing) <= 2e-4 * static_cast<double>(difference.codes) + 2);
    CHECK(static_cast<double>(difference.other_group_params) <= 2e-2 * static_cast<double>(difference.rows) + 1);
  });
}

TEST_CASE("Generic dequantizing of every format", "[runtime][gpu][generic]") {
  for_each_format([](const GenericFormat& format, int i) {
    CacheCase cache{
        .num_kv_heads = 1 + i % 3,
        .page_size = kPageSizes[i % 3],
        .lengths = {1, 0, 17, 64, 65, 300},
        .sink_tokens = i % 3 ? 0 : 5,
        .recent_tokens = i % 2 ? 0 : 30,
        .rotation = kRotations[i / 2 % 5],
        .centers = i % 4 < 2,
        .indptr = i % 2 == 1,
        .seed = 400u + static_cast<unsigned>(i),
    };
    DequantizeCase c;
    if (i % 3 == 1) c = {.first = {0, 0, 3, 60, 65, 17}, .last = {1, 0, 17, 64, 65, 283}, .gap = 24};
    check_cache(run_dequantize_case(format.dequantize(), cache, c));
  });
}

TEST_CASE("Generic prefill over every format, and rows of prefill over generic rows", "[runtime][gpu][generic]") {
  for_each_format([](const GenericFormat& format, int i) {
    if (format.heads > 16) return;
    CacheCase cache{
        .num_kv_heads = 2,
        .page_size = kPageSizes[i % 3],
        .lengths = {200, 0, 64, 127},
        .sink_tokens = i % 3 ? 0 : 5,
        .recent_tokens = i % 2 ? 0 : 30,
        .rotation = kRotations[i / 2 % 5],
        .centers = i % 4 < 2,
        .seed = 500u + static_cast<unsigned>(i),
    };
    PrefillCase c{.heads = format.heads, .chunks = {33, 70, 1, 16}, .generic = true};
    if (i % 3 == 0) c.sliding_window = 1 + i * 7 % 90;
    if (i % 4 == 1) c.sinks = true;
    if (i % 5 == 2) c.workspace_bytes = 1;
    if (i % 6 == 3) c.replay = {7, 0, 1, 16};
    const DequantizeVariant rows = format.dequantize();
    check_cache(run_prefill_case(rows, cache, c), 1e-3);
    if (find_prefill_variant(rows)) {
      c.generic = false, c.portable = i % 2;
      check_cache(run_prefill_case(rows, cache, c), 1e-3);
    }
  });
}

TEST_CASE("Generic attention over rows of tuned kernels", "[runtime][gpu][generic]") {
  for (const DequantizeVariant* rows : dequantize_variants()) {
    if (find_prefill_variant(*rows)) continue;
    CAPTURE(rows->name);
    check_cache(run_prefill_case(*rows, {.lengths = {150, 3}, .sink_tokens = 4, .recent_tokens = 20, .seed = 600},
                                 {.chunks = {40, 17}}),
                1e-3);
  }
}

TEST_CASE("Generic kernels in small", "[runtime][gpu][generic][sanitizer]") {
  for_each_format([](const GenericFormat& format, int i) {
    if (i < 17 && i % 3 != 1) check_small(format, i);
  });
}

TEST_CASE("Generic kernels in small for the formats since pages 2.1", "[runtime][gpu][generic][sanitizer]") {
  int i = 0;
  for (const GenericFormat& format : later_formats()) {
    CAPTURE(format.name);
    check_small(format, i++);
  }
}

TEST_CASE("Generic writing poisons rows of the formats since pages 2.1", "[runtime][gpu][generic][emulated]") {
  for (const GenericFormat& format : later_formats()) {
    CAPTURE(format.name);
    const WriteVariant variant = format.write();
    WriteCase c = random_case(variant, 18, 2, 16, 800, false);
    for (std::vector<std::uint16_t>* rows : {&c.k, &c.v}) {
      const std::size_t dim = rows->size() / 36;  // of 18 tokens and 2 heads
      (*rows)[3 * dim + dim / 2] = to_16_bits(HUGE_VALF, variant.bf16);
      (*rows)[17 * dim] = to_16_bits(-HUGE_VALF, variant.bf16);
      (*rows)[35 * dim + 1] = to_16_bits(NAN, variant.bf16);
    }
    CHECK(compare_bytes(variant, c).where == "");
  }
}
