#include <kvq/runtime/kernels/common/sequence_tokens.h>

#include <fmt/format.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <climits>
#include <string>

using namespace kvq;

namespace {

/// A sequence's length and windows, and the rule of formats/pages.md, "Exact windows", for one position at a time.
struct Case {
  WindowRule windows;
  int length = 0, exact_from = 0;
  bool has_sinks = true, has_ring = true;

  bool in_sinks(int position) const { return position < windows.sink_tokens && has_sinks; }
  bool in_ring(int position) const {
    return !in_sinks(position) && has_ring && position >= std::max(length - windows.recent_tokens, exact_from);
  }
  SequenceTokens tokens() const { return windows.tokens_of(length, exact_from, has_sinks, has_ring); }
};

/// Calls `check` for sequences of all kinds, among them those whose windows meet or hold all their tokens.
template <typename Check>
void for_each_case(const Check& check) {
  for (const int sinks : {0, 1, 16, 21})
    for (const int recent : {0, 1, 7, 40})
      for (const int exact_from : {0, 1, 9, 16, 30, 45, 100})
        for (const bool has_sinks : {false, true})
          for (const bool has_ring : {false, true})
            for (int length = 0; length < 70; ++length)
              check(Case{{sinks, recent}, length, exact_from, has_sinks, has_ring});
}

/// The sequence in a failure's message.
std::string text_of(const Case& c) {
  return fmt::format("{} sink and {} recent tokens, length {}, exact from {}, sinks {}, ring {}", c.windows.sink_tokens,
                     c.windows.recent_tokens, c.length, c.exact_from, c.has_sinks, c.has_ring);
}

}  // namespace

TEST_CASE("The tokens of a sequence are exact where the format's rule says so, position by position", "[runtime]") {
  for_each_case([](const Case& c) {
    INFO(text_of(c));
    const SequenceTokens tokens = c.tokens();
    bool right = true;
    for (int p = 0; p < c.length; ++p) {
      right = right && (p < tokens.sink_end) == c.in_sinks(p);
      right = right && (p >= tokens.recent_begin) == c.in_ring(p);
      right = right && tokens.is_exact(p) == (c.in_sinks(p) || c.in_ring(p));
    }
    CHECK(right);
  });
}

TEST_CASE("Sinks end before recent tokens begin, and both lie in the sequence", "[runtime]") {
  for_each_case([](const Case& c) {
    INFO(text_of(c));
    const SequenceTokens tokens = c.tokens();
    CHECK(tokens.length == c.length);
    CHECK((0 <= tokens.sink_end && tokens.sink_end <= tokens.recent_begin && tokens.recent_begin <= c.length));
  });
}

TEST_CASE("Coded positions from any first one on are those that are not exact", "[runtime]") {
  for_each_case([](const Case& c) {
    INFO(text_of(c));
    const SequenceTokens tokens = c.tokens();
    bool right = true;
    for (int first = 0; first <= c.length + 1; ++first) {
      const PositionRange coded = tokens.coded_from(first);
      right = right && first <= coded.begin && coded.begin <= coded.end && coded.end <= std::max(c.length, first);
      int count = 0;
      for (int p = 0; p < c.length; ++p) {
        const bool expected = p >= first && !c.in_sinks(p) && !c.in_ring(p);
        right = right && coded.contains(p) == expected;
        count += expected;
      }
      right = right && coded.count() == count;
    }
    CHECK(right);
  });
}

TEST_CASE("A sequence without slots is read from its pages alone", "[runtime]") {
  const SequenceTokens tokens = WindowRule{64, 256}.tokens_of(1000, 0, false, false);
  CHECK(tokens.coded_from(0).begin == 0);
  CHECK(tokens.coded_from(0).end == 1000);
}

TEST_CASE("After a hit, tokens of the hit are read from pages until enough tokens follow", "[runtime]") {
  const WindowRule windows{4, 8};
  CHECK(windows.tokens_of(100, 100, true, true).recent_begin == 100);
  CHECK(windows.tokens_of(103, 100, true, true).recent_begin == 100);
  CHECK(windows.tokens_of(108, 100, true, true).recent_begin == 100);
  CHECK(windows.tokens_of(109, 100, true, true).recent_begin == 101);
  CHECK(windows.tokens_of(50, 100, true, true).recent_begin == 50);  // taken back to before the end of the hit
}

TEST_CASE("Windows and lengths up to the largest int do not overflow", "[runtime]") {
  const SequenceTokens most = WindowRule{INT_MAX, INT_MAX}.tokens_of(INT_MAX, INT_MAX, true, true);
  CHECK(most.sink_end == INT_MAX);
  CHECK(most.recent_begin == INT_MAX);
  const SequenceTokens recent = WindowRule{0, INT_MAX}.tokens_of(INT_MAX, INT_MIN, true, true);
  CHECK(recent.recent_begin == 0);
  CHECK(WindowRule{0, 1}.tokens_of(INT_MAX, 0, false, true).recent_begin == INT_MAX - 1);
}
