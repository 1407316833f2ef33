#include "cache_case.h"

#include <kvq/runtime/kernels/prefill/variant.h>

#include <catch2/catch.hpp>

using namespace kvq;
using namespace kvq::test;

// Small cases of every kernel, for tools under which a kernel runs a thousand times slower (scripts/gpu_check.sh).
TEST_CASE("Decode in small: windows, rotations, splits of a work tile in many blocks", "[runtime][gpu][sanitizer]") {
  for (const DecodeVariant* variant : decode_variants()) {
    CAPTURE(variant->name);
    const DecodeOutcome outcome = run_decode_case(*variant, {
                                                                .num_kv_heads = 2,
                                                                .heads = variant->max_rows,
                                                                .page_size = 32,
                                                                .lengths = {333, 0, 70, 1},
                                                                .sink_tokens = 4,
                                                                .recent_tokens = 30,
                                                                .rotation = CaseRotation::hadamard,
                                                                .centers = true,
                                                                .seed = 11,
                                                            });
    CHECK(outcome.failure == "");
    CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  }
}

TEST_CASE("Decode in small: blocks with more work tiles than query buffers", "[runtime][gpu][sanitizer]") {
  for (const DecodeVariant* variant : decode_variants()) {
    CAPTURE(variant->name);
    DecodeLaunch launch;
    REQUIRE(variant->plan(launch).ok());
    DecodeCase c{.num_kv_heads = 8, .heads = 1, .page_size = 16, .sink_tokens = 8, .recent_tokens = 16, .seed = 18};
    for (int i = 0; i < 6 * launch.blocks / c.num_kv_heads + 1; ++i) c.lengths.push_back(1 + i * 37 % 50);
    const DecodeOutcome outcome = run_decode_case(*variant, c);
    CHECK(outcome.failure == "");
    CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  }
}

TEST_CASE("Prefill and dequantizing in small: rotations, windows, both kernels", "[runtime][gpu][sanitizer]") {
  const CacheCase cache{
      .page_size = 32,
      .lengths = {150, 0},
      .sink_tokens = 4,
      .recent_tokens = 20,
      .rotation = CaseRotation::dense,
      .seed = 12,
  };
  for (const DequantizeVariant* rows : dequantize_variants()) {
    CAPTURE(rows->name);
    CHECK(run_dequantize_case(*rows, cache, {}).failure == "");
    if (!find_prefill_variant(*rows)) continue;
    for (const bool portable : {false, true})
      CHECK(run_prefill_case(*rows, cache, {.chunks = {9, 3}, .portable = portable}).failure == "");
  }
}

TEST_CASE("Transforms in small: scales of channels, matrices near the bound", "[runtime][gpu][sanitizer]") {
  const auto rotation = GENERATE(CaseRotation::scaled, CaseRotation::transform);
  for (const DecodeVariant* variant : decode_variants()) {
    CAPTURE(variant->name);
    const DecodeOutcome outcome = run_decode_case(*variant, {
                                                                .num_kv_heads = 2,
                                                                .heads = variant->max_rows,
                                                                .page_size = 32,
                                                                .lengths = {70, 0, 17},
                                                                .sink_tokens = 4,
                                                                .recent_tokens = 20,
                                                                .rotation = rotation,
                                                                .centers = true,
                                                                .seed = 19,
                                                            });
    CHECK(outcome.failure == "");
    CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  }
  const CacheCase cache{
      .page_size = 32,
      .lengths = {70, 0},
      .sink_tokens = 4,
      .recent_tokens = 20,
      .rotation = rotation,
      .centers = true,
      .seed = 20,
  };
  for (const DequantizeVariant* rows : dequantize_variants()) {
    CAPTURE(rows->name);
    const CacheOutcome dequantized = run_dequantize_case(*rows, cache, {});
    CHECK(dequantized.failure == "");
    CHECK(dequantized.error <= 2.0 * dequantized.plain_error + 1e-6);
    if (!find_prefill_variant(*rows)) continue;
    const CacheOutcome attended = run_prefill_case(*rows, cache, {.chunks = {9, 3}, .portable = true});
    CHECK(attended.failure == "");
    CHECK(attended.error <= 2.0 * attended.plain_error + 1e-6);
  }
}
