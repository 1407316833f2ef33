#include <kvq/runtime/kernels/common/tiers.h>

#include <catch2/catch.hpp>

using namespace kvq;

TEST_CASE("A token's tier follows from its position and the length alone", "[runtime]") {
  const Tiers tiers{4, 3};
  CHECK(tiers.tier_of(0, 20) == Tier::sink);
  CHECK(tiers.tier_of(3, 20) == Tier::sink);
  CHECK(tiers.tier_of(4, 20) == Tier::coded);
  CHECK(tiers.tier_of(16, 20) == Tier::coded);
  CHECK(tiers.tier_of(17, 20) == Tier::recent);
  CHECK(tiers.tier_of(3, 5) == Tier::sink);  // in both windows
  CHECK(tiers.tier_of(4, 5) == Tier::recent);
}

TEST_CASE("The coded range has exactly the tokens of the coded tier", "[runtime]") {
  const int sinks = GENERATE(0, 1, 16, 21), recent = GENERATE(0, 1, 7, 40);
  const Tiers tiers{sinks, recent};
  for (int length = 0; length < 90; ++length) {
    CAPTURE(sinks, recent, length);
    const PositionRange coded = tiers.coded(length);
    CHECK((coded.begin >= 0 && coded.begin <= coded.end && coded.end <= length));
    for (int position = 0; position < length; ++position) {
      CAPTURE(position);
      CHECK(coded.contains(position) == (tiers.tier_of(position, length) == Tier::coded));
      CHECK(tiers.exact(position, length) != coded.contains(position));
    }
    for (int first = 0; first <= length; ++first) {
      CAPTURE(first);
      const PositionRange seen = tiers.coded_from(first, length);
      CHECK((seen.begin >= first && seen.begin <= seen.end && seen.end <= length));
      for (int position = first; position < length; ++position)
        CHECK(seen.contains(position) == coded.contains(position));
    }
  }
}

TEST_CASE("Demotion takes the tokens whose tier changes from exact to coded", "[runtime]") {
  const int sinks = GENERATE(0, 5, 16), recent = GENERATE(0, 1, 12);
  const Tiers tiers{sinks, recent};
  for (int before = 0; before < 50; ++before)
    for (int length = before; length < 70; ++length) {
      CAPTURE(sinks, recent, before, length);
      const PositionRange demoted = tiers.demoted(before, length);
      for (int position = 0; position < before; ++position) {
        CAPTURE(position);
        CHECK(demoted.contains(position) == (tiers.exact(position, before) && !tiers.exact(position, length)));
      }
    }
}

TEST_CASE("Without recent tokens nothing enters the ring and nothing is demoted", "[runtime]") {
  const Tiers tiers{4, 0};
  CHECK(tiers.enters_window(3, 100, 0));
  CHECK_FALSE(tiers.enters_window(4, 5, 0));
  CHECK(tiers.demoted(50, 90).count() == 0);
}

TEST_CASE("Sinks are never demoted, and a step demotes only tokens that were there before it", "[runtime]") {
  const Tiers tiers{8, 16};
  CHECK(tiers.demoted(10, 11).count() == 0);
  CHECK(tiers.demoted(24, 25).begin == 8);
  CHECK(tiers.demoted(24, 25).count() == 1);
  CHECK(tiers.demoted(10, 500).begin == 8);
  CHECK(tiers.demoted(10, 500).end == 10);
  CHECK(tiers.demoted(100, 100).count() == 0);
  CHECK(tiers.demoted(0, 500).count() == 0);
}
