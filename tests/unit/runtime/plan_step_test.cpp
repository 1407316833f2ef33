#include <kvq/runtime/kernels/common/tiers.h>
#include <kvq/runtime/kernels/plan_step/launch.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace kvq;

namespace {

/// The cache of one sequence, with numbers of tokens in place of rows.
struct Cache {
  Tiers tiers;
  WindowLayout layout;
  std::map<int, int> window, page;  ///< by row, by position
  std::vector<int> tokens;
  int next_name = 0;

  Cache(int sinks, int recent, int ring_rows) : tiers{sinks, recent} {
    layout.sink_rows = (sinks + 15) / 16 * 16, layout.ring_rows = ring_rows;
  }
  int row(int position) const { return layout.row(position, tiers.sink_tokens); }
  int length() const { return static_cast<int>(tokens.size()); }

  void append(int n) {
    const int before = length();
    for (int i = 0; i < n; ++i) tokens.push_back(next_name++);
    const PositionRange demoted = tiers.demoted(before, length());
    REQUIRE(demoted.count() <= std::min(n, tiers.recent_tokens));
    for (int p = demoted.begin; p < demoted.end; ++p) page[p] = window[row(p)];
    for (int p = before; p < length(); ++p) {
      if (!tiers.exact(p, length())) page[p] = tokens[static_cast<std::size_t>(p)];
      if (tiers.enters_window(p, length(), layout.ring_rows)) window[row(p)] = tokens[static_cast<std::size_t>(p)];
    }
  }
  /// First position whose token is not where its tier says; -1 if there is none.
  int first_wrong() {
    for (int p = 0; p < length(); ++p)
      if ((tiers.exact(p, length()) ? window[row(p)] : page[p]) != tokens[static_cast<std::size_t>(p)]) return p;
    return -1;
  }
};

/// Runs random steps and takes back up to `rollback` tokens of each.
/// @return  number of steps after which a token was misplaced
int wrong_steps(int sinks, int recent, int ring_rows, int rollback, unsigned seed) {
  Cache cache(sinks, recent, ring_rows);
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
  int wrong = 0;
  for (int step = 0; step < 60; ++step) {
    const int n = random() % 8 == 0 ? up_to(3 * ring_rows) : up_to(std::max(rollback, 2));
    cache.append(n);
    wrong += cache.first_wrong() >= 0;
    cache.tokens.resize(static_cast<std::size_t>(cache.length() - up_to(std::min(rollback, n))));
    wrong += cache.first_wrong() >= 0;
  }
  return wrong;
}

PlanStepParams good() {
  static std::int32_t ints[8];
  static std::int64_t longs[8];
  PlanStepParams p;
  p.batch = 2, p.num_tokens = 5, p.max_demotions = 5;
  p.seq_lens = p.token_indptr = p.page_table = p.window_slots = ints, p.page_table_stride = 4;
  p.sink_tokens = 4, p.recent_tokens = 30, p.max_rollback = 18;
  p.window_layout.sink_rows = 16, p.window_layout.ring_rows = 48;
  p.slot_mapping = p.window_mapping = p.demote_from = p.demote_to = longs;
  p.num_demotions = ints;
  return p;
}

}  // namespace

TEST_CASE("Tokens lie where their tier says, after appending and after taking back", "[runtime]") {
  const int sinks = GENERATE(0, 1, 16, 21), recent = GENERATE(1, 7, 16, 40), rollback = GENERATE(0, 1, 9);
  const int ring_rows = (recent + rollback + 15) / 16 * 16;
  for (unsigned seed = 0; seed < 5; ++seed) {
    CAPTURE(sinks, recent, rollback, ring_rows, seed);
    CHECK(wrong_steps(sinks, recent, ring_rows, rollback, seed) == 0);
  }
}

TEST_CASE("A ring without room for what is taken back loses tokens", "[runtime]") {
  CHECK(wrong_steps(3, 16, 16, 9, 1) > 0);
  CHECK(wrong_steps(3, 16, 32, 9, 1) == 0);
}

TEST_CASE("Rows of all slots lie in the tile pair of their slot, head and row", "[plan]") {
  const WindowLayout layout{3, {128, 16, 128, 0}, {64, 16, 64, 0}, {64, 16, 64, 0}, 16, 48};
  for (int slot = 0; slot < 4; ++slot)
    for (int head = 0; head < 3; ++head)
      for (int row = 0; row < layout.rows(); ++row)
        REQUIRE(layout.tile_pair(std::int64_t{slot} * layout.rows() + row, head) +
                    exact_offset(128, row % kTileTokens, 77) ==
                slot * layout.slot_bytes() + head * layout.head_bytes() + layout.key_offset(row, 77));
}

TEST_CASE("Steps that cannot be are refused by name", "[runtime]") {
  CHECK(std::string(check_plan_step(good()).message()) == "");
  const auto refusal = [&](auto change) {
    PlanStepParams p = good();
    change(p);
    const Status status = check_plan_step(p);
    CHECK_FALSE(status.ok());
    return std::string(status.message());
  };
  using Catch::Contains;
  CHECK_THAT(refusal([](PlanStepParams& p) { p.num_tokens = -1; }), Contains("-1 tokens"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.page_shift = 7; }), Contains("16, 32 and 64"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.sink_tokens = -1; }), Contains("0 or more"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.sink_tokens = 17; }), Contains("17 or more sink rows"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.window_layout.ring_rows = 40; }), Contains("40 ring rows"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.max_rollback = 19; }), Contains("48 ring rows do not hold 30 recent"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.window_slots = nullptr; }), Contains("window_slots"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.window_mapping = nullptr; }), Contains("window_mapping"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.seq_lens = nullptr; }), Contains("seq_lens"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.page_table_stride = 0; }), Contains("page_table_stride is 0"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.slot_mapping = nullptr; }), Contains("slot_mapping"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.max_demotions = 4; }), Contains("room for 4 demotions, expected 5"));
  CHECK_THAT(refusal([](PlanStepParams& p) { p.demote_to = nullptr; }), Contains("demote_to"));
  // A few recent tokens of a few sequences need less room than the step has tokens. Without recent tokens no windows
  // are needed.
  PlanStepParams p = good();
  p.recent_tokens = 2, p.max_demotions = 4;
  CHECK(check_plan_step(p).ok());
  p.recent_tokens = p.sink_tokens = p.max_demotions = 0;
  p.window_slots = nullptr, p.window_mapping = nullptr, p.window_layout = {};
  CHECK(check_plan_step(p).ok());
}
