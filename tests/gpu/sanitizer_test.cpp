#include "decode_case.h"

#include <catch2/catch.hpp>

using namespace kvq;
using namespace kvq::test;

// A little of everything, for tools under which a kernel runs a thousand times slower (scripts/gpu_check.sh).
TEST_CASE("Decode in small: windows, rotations, pieces of an item in many blocks", "[runtime][gpu][sanitizer]") {
  for (const DecodeVariant* variant : decode_variants()) {
    CAPTURE(variant->name);
    const DecodeOutcome outcome = run_decode_case(*variant, {.num_kv_heads = 2,
                                                             .heads = variant->max_heads,
                                                             .page_size = 32,
                                                             .lengths = {333, 0, 70, 1},
                                                             .sink_tokens = 4,
                                                             .recent_tokens = 30,
                                                             .rotation = CaseRotation::hadamard,
                                                             .centers = true,
                                                             .seed = 11});
    CHECK(outcome.failure == "");
    CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  }
}
