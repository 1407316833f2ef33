#include "cache_case.h"

#include <catch2/catch.hpp>

#include <string>

using namespace kvq;
using namespace kvq::test;

namespace {

void run_all(const CacheCase& cache, const DequantizeCase& c = {}) {
  for (const DequantizeVariant* variant : dequantize_variants()) {
    CAPTURE(variant->name, cache.page_size, cache.sink_tokens, cache.recent_tokens, cache.seed);
    const CacheOutcome outcome = run_dequantize_case(*variant, cache, c);
    CHECK(outcome.failure == "");
    // The remaining errors are the rounding of the result, which plain loops have, too, and of a dense rotation.
    CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  }
}

const std::vector<int> kRagged = {1, 0, 17, 63, 64, 65, 300, 1021};

}  // namespace

TEST_CASE("Coded rows come back", "[runtime][gpu]") {
  const int page_size = GENERATE(16, 32, 64);
  run_all({.num_kv_heads = 3, .page_size = page_size, .lengths = kRagged});
}

TEST_CASE("Rows of exact windows come back, whose borders fall anywhere", "[runtime][gpu]") {
  const int sinks = GENERATE(0, 1, 16, 37), recent = GENERATE(0, 1, 31, 256);
  run_all({.page_size = 16, .lengths = kRagged, .sink_tokens = sinks, .recent_tokens = recent, .seed = 2});
}

TEST_CASE("Rotations are undone, centers added", "[runtime][gpu]") {
  const auto rotation = GENERATE(CaseRotation::none, CaseRotation::hadamard, CaseRotation::dense, CaseRotation::scaled,
                                 CaseRotation::transform);
  const bool centers = GENERATE(false, true);
  run_all({
      .lengths = kRagged,
      .sink_tokens = 4,
      .recent_tokens = 30,
      .rotation = rotation,
      .centers = centers,
      .indptr = true,
      .seed = 3,
  });
}

TEST_CASE("Part of the tokens, into rows that lie apart", "[runtime][gpu]") {
  run_all({.page_size = 32, .lengths = {300, 300, 300, 0, 77}, .sink_tokens = 5, .recent_tokens = 20},
          {.first = {0, 17, 299, 0, 40}, .last = {1, 283, 300, 0, 40}, .gap = 24});
}

TEST_CASE("Rows of nobody", "[runtime][gpu]") { run_all({}); }
