#include "cache_case.h"

#include <kvq/runtime/kernels/prefill/variant.h>

#include <catch2/catch.hpp>

#include <string>

using namespace kvq;
using namespace kvq::test;

namespace {

/// Runs the case with every format that prefill supports, and both kernels.
void run_all(const CacheCase& cache, PrefillCase c) {
  for (const DequantizeVariant* rows : dequantize_variants()) {
    if (!find_prefill_variant(*rows)) continue;
    for (const bool portable : {false, true}) {
      c.portable = portable;
      CAPTURE(rows->name, portable, c.heads, cache.page_size, c.sliding_window, cache.seed);
      const CacheOutcome outcome = run_prefill_case(*rows, cache, c);
      CHECK(outcome.failure == "");
      // Plain loops round keys, values and results to 16 bits; the kernels also round weights to 16 bits.
      CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
      CHECK(outcome.lse_error <= 2.0 * outcome.lse_plain_error + 1e-3);
    }
  }
}

}  // namespace

TEST_CASE("Chunks over a packed prefix agree with plain loops", "[runtime][gpu]") {
  const int page_size = GENERATE(16, 32, 64);
  run_all({.page_size = page_size, .lengths = {500, 0, 1, 64, 127}}, {.chunks = {33, 130, 1, 64, 2}});
}

TEST_CASE("Every number of query heads of a KV head", "[runtime][gpu]") {
  const int heads = GENERATE(range(1, 17));
  run_all({.lengths = {100, 129}, .seed = 2}, {.heads = heads, .chunks = {17, 70}});
}

TEST_CASE("Chunks without a prefix", "[runtime][gpu]") {
  run_all({.lengths = {0, 0, 0}, .seed = 3}, {.chunks = {300, 1, 65}});
}

TEST_CASE("A prefix with exact windows, rotations and centers", "[runtime][gpu]") {
  const auto rotation = GENERATE(CaseRotation::none, CaseRotation::hadamard, CaseRotation::dense, CaseRotation::scaled,
                                 CaseRotation::transform);
  const int recent = GENERATE(0, 100);
  run_all(
      {
          .page_size = 32,
          .lengths = {400, 3, 150},
          .sink_tokens = 20,
          .recent_tokens = recent,
          .rotation = rotation,
          .centers = true,
          .indptr = true,
          .seed = 4,
      },
      {.chunks = {40, 90, 7}});
}

TEST_CASE("A chunk that is in the cache already is taken from the caller", "[runtime][gpu]") {
  run_all({.lengths = {400, 60, 150}, .sink_tokens = 4, .recent_tokens = 64, .seed = 5},
          {.chunks = {40, 60, 7}, .written = {40, 60, 7}});
}

TEST_CASE("Chunks see a sliding window only", "[runtime][gpu]") {
  const int window = GENERATE(1, 15, 64, 300);
  run_all({.page_size = 16, .lengths = {700, 0, 90}, .sink_tokens = 16, .recent_tokens = 40, .seed = 6},
          {.chunks = {150, 200, 1}, .sliding_window = window});
}

TEST_CASE("Learned sinks take part of the weight, in sharp attention too", "[runtime][gpu]") {
  const float sharpness = GENERATE(1.0f, 20.0f);
  run_all({.lengths = {300, 20}, .seed = 7}, {.chunks = {50, 100}, .sinks = true, .sharpness = sharpness});
}

TEST_CASE("Capped scores of chunks", "[runtime][gpu]") {
  const float softcap = GENERATE(0.5f, 30.0f);
  run_all({.lengths = {300, 20}, .sink_tokens = 4, .recent_tokens = 30, .centers = true, .seed = 17},
          {.chunks = {50, 100}, .sliding_window = 200, .sharpness = 4.0f, .softcap = softcap});
}

TEST_CASE("A small workspace: a few items at a time", "[runtime][gpu]") {
  const std::int64_t bytes = GENERATE(1, 1 << 20);
  run_all({.num_kv_heads = 3, .lengths = {500, 0, 260}, .recent_tokens = 16, .seed = 8},
          {.heads = 2, .chunks = {33, 130, 40}, .workspace_bytes = bytes});
}

TEST_CASE("A captured prefill replays with other chunks", "[runtime][gpu]") {
  run_all({.lengths = {300, 150, 64}, .recent_tokens = 40, .seed = 9}, {.chunks = {100, 64, 33}, .replay = {7, 0, 33}});
}

TEST_CASE("Prefill of nothing", "[runtime][gpu]") {
  run_all({}, {});
  run_all({.lengths = {100, 5}}, {.chunks = {0, 0}});
}

TEST_CASE("Long chunks", "[runtime][gpu][slow]") {
  run_all({.num_kv_heads = 1, .lengths = {3000}, .recent_tokens = 256, .seed = 10}, {.heads = 8, .chunks = {400}});
}
