#include <kvq/runtime/kernels/plan_step/launch.h>

#include <catch2/catch.hpp>

#include <cstddef>
#include <string>

using namespace kvq;
using Catch::Contains;

namespace {

/// Valid parameters; no test follows the pointers.
PlanStepParams good() {
  static std::int32_t ints[8];
  static std::int64_t longs[8];
  static std::uint64_t ids[8];
  PlanStepParams p;
  p.batch = 2, p.num_tokens = 5;
  p.seq_lens = p.token_indptr = p.page_table = p.page_indptr = p.sink_slots = p.ring_slots = p.exact_from = ints;
  p.page_table_stride = 4, p.sequence_ids = ids;
  p.windows = {4, 30}, p.max_rollback = 18;
  p.sink_rows = 16, p.ring_rows = 48;
  p.slot_mapping = p.window_mapping = longs;
  return p;
}

/// The message for parameters with one change.
template <typename Change>
std::string refusal(const Change& change) {
  PlanStepParams p = good();
  change(p);
  const Status status = check_plan_step(p);
  CHECK(status.code() == StatusCode::invalid_argument);
  return status.message();
}

template <typename T>
const T* moved(const T* pointer, std::size_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(pointer) + bytes);
}

/// Checks that parameters with one change are accepted.
template <typename Change>
void expect_sound(const Change& change) {
  PlanStepParams p = good();
  change(p);
  CHECK(std::string(check_plan_step(p).message()) == "");
}

}  // namespace

TEST_CASE("Steps that cannot be are refused by name", "[runtime]") {
  using P = PlanStepParams;
  expect_sound([](P&) {});
  CHECK_THAT(refusal([](P& p) { p.num_tokens = -1; }), Contains("-1 tokens"));
  CHECK_THAT(refusal([](P& p) { p.batch = -1; }), Contains("batch is -1"));
  CHECK_THAT(refusal([](P& p) { p.windows.sink_tokens = -1; }), Contains("0 or more, found -1 and 30"));
  CHECK_THAT(refusal([](P& p) { p.windows.recent_tokens = -1; }), Contains("0 or more, found 4 and -1"));
  CHECK_THAT(refusal([](P& p) { p.max_rollback = -1; }), Contains("max_rollback is -1"));
  CHECK_THAT(refusal([](P& p) { p.windows.sink_tokens = 17; }), Contains("17 or more sink rows"));
  CHECK_THAT(refusal([](P& p) { p.sink_rows = 20; }), Contains("20 sink and 48 ring rows, expected whole tiles"));
  CHECK_THAT(refusal([](P& p) { p.ring_rows = 40; }), Contains("16 sink and 40 ring rows"));
  CHECK_THAT(refusal([](P& p) { p.ring_rows = -16; }), Contains("-16 ring rows"));
  CHECK_THAT(refusal([](P& p) { p.max_rollback = 19; }),
             Contains("48 ring rows do not hold 30 recent tokens and 19 more"));
  CHECK_THAT(refusal([](P& p) { p.max_rollback = 2147483647; }), Contains("48 ring rows do not hold"));
  CHECK_THAT(refusal([](P& p) { p.seq_lens = nullptr; }), Contains("seq_lens and page_table"));
  CHECK_THAT(refusal([](P& p) { p.page_table = nullptr; }), Contains("seq_lens and page_table"));
  CHECK_THAT(refusal([](P& p) { p.token_indptr = nullptr; }), Contains("token_indptr"));
  CHECK_THAT(refusal([](P& p) { p.slot_mapping = nullptr; }), Contains("slot_mapping"));
  CHECK_THAT(refusal([](P& p) { p.window_mapping = nullptr; }), Contains("window_mapping"));
  CHECK_THAT(refusal([](P& p) { p.sink_slots = nullptr; }), Contains("4 sink tokens need sink_slots"));
  CHECK_THAT(refusal([](P& p) { p.ring_slots = nullptr; }), Contains("30 recent tokens need ring_slots"));
}

TEST_CASE("Pages of a step have 16, 32, 64 or 128 tokens", "[runtime]") {
  for (int shift = 0; shift < 10; ++shift) {
    PlanStepParams p = good();
    p.page_shift = shift;
    const Status status = check_plan_step(p);
    CHECK(status.ok() == (shift >= 4 && shift <= 7));
    if (status.ok()) continue;
    CHECK(status.code() == StatusCode::unsupported);
    CHECK_THAT(std::string(status.message()), Contains("supported are 16, 32, 64 and 128"));
  }
}

TEST_CASE("A row of the page table, or the list of all pages, has an entry", "[runtime]") {
  using P = PlanStepParams;
  CHECK_THAT(refusal([](P& p) { p.page_indptr = nullptr, p.page_table_stride = 0; }),
             Contains("page_table_stride is 0"));
  CHECK_THAT(refusal([](P& p) { p.page_indptr = nullptr, p.page_table_stride = -4; }),
             Contains("page_table_stride is -4"));
  expect_sound([](P& p) { p.page_indptr = nullptr; });
  CHECK_THAT(refusal([](P& p) { p.page_table_stride = 0; }), Contains("page_table_stride is 0"));
}

TEST_CASE("Tables of sequences are aligned to their numbers", "[runtime]") {
  using P = PlanStepParams;
  CHECK_THAT(refusal([](P& p) { p.seq_lens = moved(p.seq_lens, 2); }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.page_table = moved(p.page_table, 1); }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.page_indptr = moved(p.page_indptr, 1); }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.sink_slots = moved(p.sink_slots, 3); }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.ring_slots = moved(p.ring_slots, 2); }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.exact_from = moved(p.exact_from, 2); }), Contains("aligned to 4 bytes"));
  CHECK_THAT(refusal([](P& p) { p.sequence_ids = moved(p.sequence_ids, 4); }), Contains("aligned to 8 bytes"));
}

TEST_CASE("A step needs no tables for what is not there", "[runtime]") {
  using P = PlanStepParams;
  expect_sound([](P& p) { p.exact_from = nullptr, p.sequence_ids = nullptr, p.page_indptr = nullptr; });
  expect_sound([](P& p) { p.windows.sink_tokens = 0, p.sink_rows = 0, p.sink_slots = nullptr; });
  expect_sound([](P& p) { p.windows.recent_tokens = 0, p.ring_rows = 0, p.ring_slots = nullptr; });
  expect_sound([](P& p) {
    p.windows = {}, p.sink_rows = p.ring_rows = 0;
    p.sink_slots = p.ring_slots = nullptr, p.window_mapping = nullptr;
  });
  expect_sound(
      [](P& p) { p.batch = 0, p.seq_lens = p.page_table = p.token_indptr = p.sink_slots = p.ring_slots = nullptr; });
  expect_sound([](P& p) { p.num_tokens = 0, p.slot_mapping = p.window_mapping = nullptr; });
}
