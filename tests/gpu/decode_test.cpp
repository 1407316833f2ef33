#include "decode_case.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::test;

namespace {

void check(const DecodeVariant& variant, const DecodeCase& c) {
  const DecodeOutcome outcome = run_decode_case(variant, c);
  CHECK(outcome.failure == "");
  // The remaining error is the rounding of the result, which plain loops in float have, too.
  CHECK(outcome.error <= 2.0 * outcome.plain_error + 1e-6);
  // Scores have the rounding errors of queries, which grow with the sharpness; plain loops round queries, too.
  // Transforms make scores larger.
  const bool transformed = c.rotation == CaseRotation::scaled || c.rotation == CaseRotation::transform;
  CHECK(outcome.lse_error <= 2.0 * outcome.lse_plain_error + (transformed ? 5e-4 : 1e-4));
}

/// Runs the case with every variant that has enough heads.
void run_all(DecodeCase c) {
  const int asked = c.heads;
  for (const DecodeVariant* variant : decode_variants()) {
    c.heads = asked > 0 ? asked : variant->max_rows;
    if (c.heads > variant->max_rows) continue;
    CAPTURE(variant->name, c.heads, c.page_size, c.seed);
    check(*variant, c);
  }
}

/// Sequences that share their pages: about `work_tiles` work tiles, with at least `share` stages of at most 64
/// tokens for each block. The replay has three quarters of the tokens: a queue too short for as many rounds.
DecodeCase long_queue(int blocks, int share, int work_tiles) {
  const int heads = work_tiles >= 64 ? 8 : 1, sequences = (work_tiles + heads - 1) / heads;
  const auto tokens = static_cast<std::int64_t>(blocks) * share * 64;
  constexpr int kStep = 77, kSteps = 40;
  const int longest = static_cast<int>(tokens / heads / sequences) + kStep * kSteps;
  DecodeCase c{
      .num_kv_heads = heads,
      .sink_tokens = 64,
      .recent_tokens = 256,
      .rotation = CaseRotation::dense,
      .shared_prefix = true,
      .seed = 13,
  };
  for (int i = 0; i < sequences; ++i) c.lengths.push_back(longest - kStep * (i % kSteps));
  c.lengths.insert(c.lengths.begin() + 1, 0);
  c.replay = c.lengths;
  for (int& length : c.replay) length = length * 3 / 4;
  return c;
}

/// A queue of several rounds. With few work tiles, each query head is a unit of the combine kernel. With `many` work
/// tiles, all heads of a work tile are one unit, except for the last work tiles, which have many partial results.
void check_long_queue(const DecodeVariant& variant, bool many, int heads) {
  DecodeLaunch launch;
  REQUIRE(variant.plan(launch).ok());
  DecodeCase c = long_queue(launch.blocks, 128, many ? 2 * launch.multiprocessors : launch.multiprocessors * 7 / 8);
  c.heads = heads;
  c.centers = many;
  if (!many) c.rotation = CaseRotation::hadamard;
  CAPTURE(variant.name, many);
  check(variant, c);
}

const DecodeVariant& two_bits() {
  for (const DecodeVariant* variant : decode_variants())
    if (variant->name == std::string("decode_d128_u2g128_u2g128_h4_bf16")) return *variant;
  throw std::runtime_error("no variant of two bits");
}

/// More work tiles than blocks, by factors for which a unit of the combine kernel has two or four sequences, except at
/// the end.
DecodeCase several_sequences(CaseRotation rotation) {
  DecodeLaunch launch;
  REQUIRE(two_bits().plan(launch).ok());
  const int batch = GENERATE(3, 9) * launch.multiprocessors / 2;
  DecodeCase c{
      .num_kv_heads = 2,
      .heads = 3,
      .sink_tokens = 16,
      .recent_tokens = 32,
      .rotation = rotation,
      .centers = true,
      .seed = 16,
  };
  for (int i = 0; i < batch; ++i) c.lengths.push_back(i % 7 == 3 ? 0 : 1 + i * 37 % 190);
  return c;
}

/// New tokens in one pass and in several, of sequences with none, with nothing before them, with windows between them.
std::vector<DecodeCase> several_tokens(int heads) {
  const DecodeCase c{
      .heads = heads,
      .page_size = 16,
      .lengths = {100, 641, 5, 0, 300, 16},
      .new_tokens = {4, 1, 5, 0, 2, 16},
      .seed = 20,
  };
  DecodeCase masked = c, sliding = c, all = c;
  masked.masks = true, masked.seed = 21;
  sliding.sliding_window = 9, sliding.seed = 22;
  all.masks = true, all.sliding_window = 70, all.centers = true, all.indptr = true, all.seed = 23;
  all.rotation = CaseRotation::dense;
  all.first = {0, 600, 2, 0, 290, 3}, all.last = {99, 700, 5, 5, 299, 14};
  return {c, masked, sliding, all};
}

DecodeCase ranges(int sinks, int recent) {
  return {
      .heads = 0,
      .page_size = 32,
      .lengths = {1000, 1000, 1000, 300, 300, 64, 0, 77, 500},
      .sink_tokens = sinks,
      .recent_tokens = recent,
      .rotation = CaseRotation::hadamard,
      .centers = true,
      .first = {0, 333, 960, 10, 20, 0, 0, 50, -7},
      .last = {1000, 900, 2000, 12, 20, 64, 9, 20, 499},
      .seed = 24,
  };
}

DecodeCase capped_scores(bool centers, float softcap) {
  return {
      .heads = 0,
      .lengths = {700, 65, 3},
      .sink_tokens = 16,
      .recent_tokens = 50,
      .rotation = CaseRotation::hadamard,
      .centers = centers,
      .sharpness = 4.0f,
      .softcap = softcap,
      .seed = 25,
  };
}

/// Scales of values as far apart as their numbers allow.
DecodeCase spread_values(const DecodeVariant& variant, int length, float sharpness) {
  return {
      .num_kv_heads = 2,
      .heads = variant.max_rows,
      .lengths = {length, 77, 0},
      .sink_tokens = 8,
      .recent_tokens = 40,
      .sharpness = sharpness,
      .value_spread = variant.v_bfloat ? 60 : 14,
      .seed = 51,
  };
}

/// Scores whose rounding error alone is more than a weight may differ by. Results mean nothing, but the call must end.
void check_huge_scores(const DecodeVariant& variant, int length) {
  for (const float sharpness : {1e7f, 1e10f, 1e20f, 1e37f})
    for (const int exact : {0, 40}) {
      CAPTURE(variant.name, sharpness, exact);
      DecodeCase c = spread_values(variant, length, sharpness);
      c.sink_tokens = c.recent_tokens = exact;
      const DecodeOutcome outcome = run_decode_case(variant, c);
      if (sharpness < 1e8f) CHECK(outcome.failure == "");
    }
}

/// Variants of 8 and 16 rows that builds for tests have.
std::vector<const DecodeVariant*> many_rows() {
  std::vector<const DecodeVariant*> found;
  for (const DecodeVariant* variant : decode_variants())
    if (variant->max_rows >= 8 && !variant->k.exact()) found.push_back(variant);
  return found;
}

const std::vector<int> kRagged = {1, 0, 17, 63, 64, 65, 300, 1021, 333, 2500};

}  // namespace

TEST_CASE("Decode attention over codes alone agrees with plain loops", "[runtime][gpu]") {
  const int page_size = GENERATE(16, 32, 64);
  run_all({.heads = 0, .page_size = page_size, .lengths = kRagged});
}

TEST_CASE("Every number of query heads up to the variant's", "[runtime][gpu]") {
  const int heads = GENERATE(range(1, 17));
  run_all({.num_kv_heads = 3, .heads = heads, .page_size = 32, .lengths = {100, 641}, .seed = 2});
}

TEST_CASE("Exact windows, whose borders fall anywhere", "[runtime][gpu]") {
  const int sinks = GENERATE(0, 1, 16, 37), recent = GENERATE(0, 1, 31, 256);
  run_all({.heads = 0, .lengths = kRagged, .sink_tokens = sinks, .recent_tokens = recent, .seed = 3});
}

TEST_CASE("Rotations, centers, learned sinks", "[runtime][gpu]") {
  const auto rotation = GENERATE(CaseRotation::none, CaseRotation::hadamard, CaseRotation::dense, CaseRotation::scaled,
                                 CaseRotation::transform);
  const bool centers = GENERATE(false, true);
  run_all({
      .heads = 0,
      .page_size = 16,
      .lengths = kRagged,
      .sink_tokens = 4,
      .recent_tokens = 30,
      .rotation = rotation,
      .centers = centers,
      .seed = 4,
  });
}

TEST_CASE("Sliding windows hide what lies before", "[runtime][gpu]") {
  const int window = GENERATE(1, 15, 64, 300, 5000);
  run_all({
      .heads = 0,
      .page_size = 32,
      .lengths = kRagged,
      .sink_tokens = 64,
      .recent_tokens = 100,
      .sliding_window = window,
      .seed = 5,
  });
}

TEST_CASE("Page tables as one list, shared prefixes", "[runtime][gpu]") {
  const bool shared = GENERATE(false, true);
  run_all({
      .heads = 0,
      .page_size = 64,
      .lengths = {700, 650, 64, 0, 129},
      .indptr = true,
      .shared_prefix = shared,
      .seed = 6,
  });
}

TEST_CASE("Sharp attention: nearly all weight on few tokens", "[runtime][gpu]") {
  const int exact = GENERATE(0, 40);
  run_all(
      {.heads = 0, .lengths = {3000, 77}, .sink_tokens = exact, .recent_tokens = exact, .sharpness = 20.0f, .seed = 7});
}

TEST_CASE("Largest scores that rise from stage to stage", "[runtime][gpu][slow]") {
  // So long that a warp attends to several stages of a work tile, and so sharp that the reference of exponentials must
  // move.
  const float sharpness = GENERATE(20.0f, 80.0f);
  run_all({.num_kv_heads = 8, .heads = 0, .lengths = {40000, 3000}, .sharpness = sharpness, .seed = 17});
}

TEST_CASE("Scales of values that are far apart and zeros", "[runtime][gpu]") {
  const float sharpness = GENERATE(1.0f, 20.0f);
  for (const DecodeVariant* variant : decode_variants()) {
    CAPTURE(variant->name);
    check(*variant, spread_values(*variant, 3000, sharpness));
  }
}

TEST_CASE("Scales of values that are far apart in many rows", "[runtime][gpu][emulated]") {
  for (const DecodeVariant* variant : many_rows()) {
    CAPTURE(variant->name);
    check(*variant, spread_values(*variant, 500, 20.0f));
  }
}

TEST_CASE("Scores beyond the precision of a float", "[runtime][gpu]") {
  for (const DecodeVariant* variant : decode_variants()) check_huge_scores(*variant, 3000);
}

TEST_CASE("Scores beyond the precision of a float in many rows", "[runtime][gpu]") {
  for (const DecodeVariant* variant : many_rows()) check_huge_scores(*variant, 300);
}

TEST_CASE("Scores beyond the precision of a float in 16 rows", "[runtime][gpu][emulated]") {
  for (const DecodeVariant* variant : many_rows())
    if (variant->bf16 && variant->max_rows == 16) check_huge_scores(*variant, 300);
}

TEST_CASE("Long sequences are divided among blocks", "[runtime][gpu][slow]") {
  run_all({
      .num_kv_heads = 8,
      .heads = 0,
      .lengths = {20000, 3, 0, 9999},
      .sink_tokens = 64,
      .recent_tokens = 256,
      .seed = 8,
  });
  run_all({.num_kv_heads = 1, .heads = 0, .lengths = std::vector<int>(300, 200), .recent_tokens = 16, .seed = 9});
}

TEST_CASE("Results of several sequences are combined at once, empty ones among them", "[runtime][gpu]") {
  run_all(several_sequences(GENERATE(CaseRotation::none, CaseRotation::hadamard, CaseRotation::dense)));
}

TEST_CASE("Results of several sequences are combined at once, of one format", "[runtime][gpu][emulated]") {
  check(two_bits(), several_sequences(GENERATE(CaseRotation::hadamard, CaseRotation::dense, CaseRotation::scaled,
                                               CaseRotation::transform)));
}

TEST_CASE("The rest of a long queue is claimed, in captured calls too", "[runtime][gpu][slow]") {
  const bool many = GENERATE(false, true);
  for (const DecodeVariant* variant : decode_variants())
    check_long_queue(*variant, many, many ? variant->max_rows - 1 : variant->max_rows);
}

TEST_CASE("The rest of a long queue is claimed, of one format", "[runtime][gpu][emulated]") {
  check_long_queue(two_bits(), GENERATE(false, true), 2);
}

/// Not on the emulated device, where it takes minutes: kernels of many rows claim KV chunks by the code that the test
/// above runs there.
TEST_CASE("The rest of a long queue is claimed in many rows", "[runtime][gpu]") {
  for (const DecodeVariant* variant : many_rows())
    if (!variant->bf16 && variant->max_rows == 8) check_long_queue(*variant, false, 8);
}

TEST_CASE("A very long queue has one round more", "[runtime][gpu][slow]") {
  DecodeLaunch launch;
  REQUIRE(two_bits().plan(launch).ok());
  check(two_bits(), long_queue(launch.blocks, 1024, 2 * launch.multiprocessors));
}

TEST_CASE("A captured call replays with other lengths", "[runtime][gpu]") {
  run_all({
      .heads = 0,
      .lengths = {2000, 500, 64},
      .sink_tokens = 8,
      .recent_tokens = 40,
      .replay = {1024, 0, 33},
      .seed = 10,
  });
}

TEST_CASE("No sequence has a token", "[runtime][gpu]") {
  run_all({.heads = 0, .lengths = {2000, 500, 64}, .centers = true, .replay = {0, 0, 0}, .seed = 14});
}

TEST_CASE("Learned sinks far above and below all scores", "[runtime][gpu]") {
  const float level = GENERATE(-300.0f, 300.0f);
  run_all({.heads = 0, .lengths = {700, 1}, .centers = true, .sink_level = level, .seed = 15});
}

TEST_CASE("Several new tokens of a sequence, each with its own view", "[runtime][gpu]") {
  const int heads = GENERATE(1, 3, 4, 8, 16), windows = GENERATE(0, 1);
  for (DecodeCase c : several_tokens(heads)) {
    if (windows) c.sink_tokens = 20, c.recent_tokens = 40;
    run_all(c);
  }
}

TEST_CASE("Several new tokens of a sequence, of one format", "[runtime][gpu][emulated]") {
  for (const DecodeCase& c : several_tokens(2)) check(two_bits(), c);
}

TEST_CASE("Several new tokens of many sequences are divided among blocks", "[runtime][gpu][slow]") {
  run_all({
      .num_kv_heads = 8,
      .heads = 4,
      .lengths = {20000, 3, 9999},
      .sink_tokens = 64,
      .recent_tokens = 256,
      .replay = {15000, 3, 9000},
      .new_tokens = {4, 3, 7},
      .seed = 28,
  });
  run_all({
      .num_kv_heads = 1,
      .heads = 2,
      .lengths = std::vector<int>(300, 200),
      .recent_tokens = 16,
      .new_tokens = std::vector<int>(300, 3),
      .seed = 29,
  });
}

TEST_CASE("Geometries of gpt-oss and Gemma 3: sinks, soft caps, sliding windows and drafts together",
          "[runtime][gpu]") {
  const bool drafts = GENERATE(false, true);
  const float softcap = GENERATE(0.0f, 50.0f);
  struct Geometry {
    int head_dim, kv_heads, heads, sliding_window;
  };
  int found = 0;
  for (const Geometry& g : {Geometry{64, 8, 8, 128}, Geometry{256, 4, 2, 1024}, Geometry{128, 16, 2, 1024}})
    for (const DecodeVariant* variant : decode_variants()) {
      if (variant->k.head_dim != g.head_dim || variant->max_rows < g.heads || variant->k.exact()) continue;
      for (const int window : {g.sliding_window, 0}) {
        DecodeCase c{
            .num_kv_heads = g.kv_heads,
            .heads = g.heads,
            .lengths = {200, 2500, 7},
            .sink_tokens = 4,
            .recent_tokens = 128,
            .sliding_window = window,
            .rotation = CaseRotation::hadamard,
            .centers = true,
            .softcap = softcap,
            .seed = 40,
        };
        if (drafts) c.new_tokens = {4, 3, 1};
        CAPTURE(variant->name, window, drafts, softcap);
        check(*variant, c);
        ++found;
      }
      if (found % 2 == 0 && found >= 8) break;  // a few formats of each geometry
    }
  CHECK(found >= 4);
}

TEST_CASE("Ranges of positions, empty ones among them", "[runtime][gpu]") {
  const int sinks = GENERATE(0, 37), recent = GENERATE(0, 100);
  run_all(ranges(sinks, recent));
}

TEST_CASE("Ranges of positions, of one format", "[runtime][gpu][emulated]") {
  DecodeCase c = ranges(37, 100);
  c.heads = 3;
  check(two_bits(), c);
}

TEST_CASE("Capped scores, with and without centers", "[runtime][gpu]") {
  const bool centers = GENERATE(false, true);
  const float softcap = GENERATE(0.5f, 30.0f);
  run_all(capped_scores(centers, softcap));
}

TEST_CASE("Capped scores, of one format", "[runtime][gpu][emulated]") {
  DecodeCase c = capped_scores(true, 5.0f);
  c.heads = 3;
  check(two_bits(), c);
}

TEST_CASE("Bit tiles: windows, matrices, several tokens, replays", "[runtime][gpu][emulated]") {
  DecodeCase c = ranges(37, 100);
  c.lengths = {400, 300, 64, 0, 77}, c.first = {0, 33, 0, 0, 50}, c.last = {400, 290, 64, 9, 20};
  std::vector<DecodeCase> cases = several_tokens(2);
  cases.push_back(c);
  cases.push_back(capped_scores(true, 5.0f));
  cases.push_back({.lengths = {300, 65}, .rotation = CaseRotation::dense, .seed = 60});
  cases.push_back({.num_kv_heads = 1, .lengths = {500, 77}, .recent_tokens = 40, .sharpness = 20.0f, .seed = 61});
  cases.push_back(
      {.lengths = {600, 500, 64}, .sink_tokens = 8, .recent_tokens = 40, .replay = {524, 0, 33}, .seed = 62});
  // Codebook codes differ from linear rows in operands alone, eight rows from four in what is done twice; few cases,
  // with windows, are enough.
  const std::vector<DecodeCase> few_cases = {
      {.num_kv_heads = 1, .lengths = {140, 77}, .recent_tokens = 40, .sharpness = 20.0f, .seed = 63},
      {.lengths = {90, 64}, .sink_tokens = 8, .recent_tokens = 40, .replay = {70, 33}, .seed = 64},
  };
  // Of eight rows: two new tokens at a time, in coded and in exact stages.
  DecodeCase drafts = capped_scores(true, 5.0f);
  drafts.heads = 4, drafts.lengths = {100, 5}, drafts.new_tokens = {4, 5};
  drafts.sink_tokens = 3, drafts.recent_tokens = 20;
  int found = 0;
  for (const DecodeVariant* variant : decode_variants()) {
    if (!variant->k.is_bits()) continue;
    ++found;
    CAPTURE(variant->name);
    const bool is_table = variant->v.table_bits > 0 || variant->k.segments, is_few = is_table || variant->max_rows > 4;
    for (DecodeCase each : is_few ? few_cases : cases) {
      if (each.heads == 0) each.heads = variant->max_rows;
      CAPTURE(each.seed);
      check(*variant, each);
    }
    if (variant->max_rows > 4) check(*variant, drafts);
    check(*variant, spread_values(*variant, is_few ? 80 : 300, 1.0f));
    if (!is_table || variant->k.table_bits == 3) check_huge_scores(*variant, is_few ? 80 : 130);
  }
  CHECK(found >= 5);
}

TEST_CASE("More query heads than rows of a work tile are several passes", "[runtime][gpu]") {
  const auto cases_of = [](int heads) {
    std::vector<DecodeCase> cases = several_tokens(heads);
    DecodeCase capped = capped_scores(true, 5.0f);
    capped.heads = heads;
    cases.push_back(capped);
    cases.push_back({.heads = heads, .lengths = kRagged, .sink_tokens = 8, .recent_tokens = 40, .seed = 70});
    cases.push_back({.num_kv_heads = 1, .heads = heads, .lengths = {9000}, .replay = {4000}, .seed = 71});
    cases.push_back({
        .num_kv_heads = 2,
        .heads = heads,
        .lengths = std::vector<int>(150, 200),
        .rotation = CaseRotation::dense,
        .seed = 73,
    });
    return cases;
  };
  for (const DecodeVariant* variant : decode_variants())
    for (const int more : {1, variant->max_rows, 2 * variant->max_rows + 1})
      for (const DecodeCase& c : cases_of(variant->max_rows + more)) {
        CAPTURE(variant->name, c.heads, c.seed);
        check(*variant, c);
      }
}

TEST_CASE("More query heads than rows of a work tile, of two formats", "[runtime][gpu][emulated]") {
  for (const DecodeVariant* variant : decode_variants()) {
    if (variant->max_rows > 4 ||
        !(variant == &two_bits() || variant->name == std::string("decode_d128_w8n1_w8n1_h4_bf16")))
      continue;
    DecodeCase capped = capped_scores(true, 5.0f);
    capped.heads = 5, capped.lengths = {130, 3}, capped.new_tokens = {2, 1};
    CAPTURE(variant->name);
    check(*variant, capped);
    check(*variant, {.num_kv_heads = 2, .heads = 8, .lengths = {150, 0, 66}, .recent_tokens = 40, .seed = 72});
  }
}

TEST_CASE("A batch of nothing", "[runtime][gpu]") { run_all({.heads = 0, .lengths = {}}); }
