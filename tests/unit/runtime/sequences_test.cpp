#include <kvq/runtime/kernels/common/sequences.h>

#include <catch2/catch.hpp>

#include <climits>
#include <cstdint>

using namespace kvq;

namespace {

constexpr WindowRule kWindows{4, 30};
constexpr CacheExtents kExtents{.num_pages = 100, .num_sink_slots = 3, .num_ring_slots = 5};
constexpr int kPageShift = 4;

/// A sequence that fits, of 40 tokens in a table of four pages.
constexpr SequenceEntry kGood{.length = 40, .table_entries = 4, .sink_slot = 2, .ring_slot = 4, .exact_from = 15};

CheckedSequence checked(const SequenceEntry& entry, const CacheExtents& extents = kExtents) {
  return check_sequence(entry, kWindows, extents, kPageShift);
}

/// A sequence like the good one but for one change.
template <typename Change>
CheckedSequence changed(const Change& change, const CacheExtents& extents = kExtents) {
  SequenceEntry entry = kGood;
  change(entry);
  return checked(entry, extents);
}

/// Checks that a sequence has this fault, and then no tokens.
void expect_fault(const CheckedSequence& found, FaultCode code, std::int64_t value) {
  CHECK(found.fault);
  CHECK(found.fault.code == code);
  CHECK(found.fault.value == value);
  CHECK(found.tokens.length == 0);
  CHECK(found.tokens.sink_end == 0);
  CHECK(found.tokens.recent_begin == 0);
}

/// Checks that a sequence has no fault, and these tokens.
void expect_tokens(const CheckedSequence& found, const SequenceTokens& expected) {
  CHECK_FALSE(found.fault);
  CHECK(found.tokens.length == expected.length);
  CHECK(found.tokens.sink_end == expected.sink_end);
  CHECK(found.tokens.recent_begin == expected.recent_begin);
}

}  // namespace

TEST_CASE("A sequence that fits has the tokens that its windows give", "[runtime]") {
  expect_tokens(checked(kGood), {.length = 40, .sink_end = 4, .recent_begin = 15});
  expect_tokens(changed([](SequenceEntry& e) { e.exact_from = 0; }), {40, 4, 10});
  expect_tokens(changed([](SequenceEntry& e) { e.length = 0; }), {0, 0, 0});
}

TEST_CASE("A length below 0 or beyond the page table is a fault, whatever the size of a page", "[runtime]") {
  const auto with_length = [](int length, std::int64_t entries, int shift) {
    SequenceEntry entry = kGood;
    entry.length = length, entry.table_entries = entries;
    return check_sequence(entry, kWindows, kExtents, shift);
  };
  for (const int shift : {4, 5, 6, 7}) {
    CAPTURE(shift);
    const int most = 3 << shift;
    CHECK_FALSE(with_length(most, 3, shift).fault);
    expect_fault(with_length(most + 1, 3, shift), FaultCode::length, most + 1);
    for (const int length : {-1, -1000, INT_MIN})
      expect_fault(with_length(length, 3, shift), FaultCode::length, length);
    expect_fault(with_length(INT_MAX, 3, shift), FaultCode::length, INT_MAX);
    CHECK_FALSE(with_length(INT_MAX, std::int64_t{1} << 40, shift).fault);
    CHECK_FALSE(with_length(0, 0, shift).fault);
    expect_fault(with_length(1, 0, shift), FaultCode::length, 1);
    // A list of pages whose index descends.
    for (const int length : {0, 1}) expect_fault(with_length(length, -1, shift), FaultCode::length, length);
  }
}

TEST_CASE("Slots beyond the pools are faults, slots below 0 are none", "[runtime]") {
  expect_tokens(changed([](SequenceEntry& e) { e.sink_slot = 0, e.ring_slot = 0; }), {40, 4, 15});
  for (const int slot : {3, 4, INT_MAX})
    expect_fault(changed([&](SequenceEntry& e) { e.sink_slot = slot; }), FaultCode::sink_slot, slot);
  for (const int slot : {5, 6, INT_MAX})
    expect_fault(changed([&](SequenceEntry& e) { e.ring_slot = slot; }), FaultCode::ring_slot, slot);
  for (const int slot : {-1, -7, INT_MIN}) {
    expect_tokens(changed([&](SequenceEntry& e) { e.sink_slot = slot; }), {40, 0, 15});
    expect_tokens(changed([&](SequenceEntry& e) { e.ring_slot = slot; }), {40, 4, 40});
    expect_tokens(changed([&](SequenceEntry& e) { e.sink_slot = e.ring_slot = slot; }), {40, 0, 40});
  }
}

TEST_CASE("A pool that is not there has no slot", "[runtime]") {
  constexpr CacheExtents none{.num_pages = 100, .num_sink_slots = 0, .num_ring_slots = 0};
  expect_fault(changed([](SequenceEntry& e) { e.sink_slot = 0, e.ring_slot = -1; }, none), FaultCode::sink_slot, 0);
  expect_fault(changed([](SequenceEntry& e) { e.sink_slot = -1, e.ring_slot = 0; }, none), FaultCode::ring_slot, 0);
  CHECK_FALSE(changed([](SequenceEntry& e) { e.sink_slot = e.ring_slot = -1; }, none).fault);
}

TEST_CASE("The first fault of a sequence is told: length, sink slot, ring slot", "[runtime]") {
  const auto all = [](SequenceEntry& e) { e.length = -1, e.sink_slot = 9, e.ring_slot = 9; };
  CHECK(changed(all).fault.code == FaultCode::length);
  CHECK(changed([](SequenceEntry& e) { e.sink_slot = e.ring_slot = 9; }).fault.code == FaultCode::sink_slot);
}

TEST_CASE("Without extents no slot is a fault, but lengths are still checked", "[runtime]") {
  constexpr CacheExtents unchecked{};
  CHECK_FALSE(changed([](SequenceEntry& e) { e.sink_slot = e.ring_slot = INT_MAX - 1; }, unchecked).fault);
  expect_fault(changed([](SequenceEntry& e) { e.length = 65; }, unchecked), FaultCode::length, 65);
}

TEST_CASE("Where exact rows begin may be anything", "[runtime]") {
  expect_tokens(changed([](SequenceEntry& e) { e.exact_from = INT_MIN; }), {40, 4, 10});
  expect_tokens(changed([](SequenceEntry& e) { e.exact_from = 41; }), {40, 4, 40});
  expect_tokens(changed([](SequenceEntry& e) { e.exact_from = INT_MAX; }), {40, 4, 40});
}
