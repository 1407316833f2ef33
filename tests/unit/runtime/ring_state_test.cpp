#include <kvq/runtime/kernels/common/ring_state.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

/// Steps of sequences that use one ring after the other, against a model that keeps the name of the token in each row.
using namespace kvq;

namespace {

/// A sequence: the names of its tokens, which no other token has, also none that was taken back.
struct Sequence {
  std::uint64_t id = 0;
  int exact_from = 0;
  bool has_sinks = false;
  std::vector<int> tokens = {};
  int length() const { return static_cast<int>(tokens.size()); }
};

/// One step of a sequence: how many of its tokens it keeps, how many it adds.
struct Change {
  int kept = 0, added = 0;
};

/// A ring, and what a step did to it.
class Ring {
 public:
  Ring(const WindowRule& windows, int rows) : windows_(windows), names_(static_cast<std::size_t>(rows), -1) {}

  /// Makes a step, if the ring is not foreign. @return  is it?
  bool step(Sequence& sequence, const Change& change) {
    sequence.tokens.resize(static_cast<std::size_t>(change.kept));
    for (int i = 0; i < change.added; ++i) sequence.tokens.push_back(next_name_++);
    const RingStep step{sequence.id, change.kept, sequence.exact_from, tokens_of(sequence)};
    const bool foreign = is_foreign(state_, step);
    const bool begins = change.kept <= sequence.exact_from && change.added > 0, reads = reads_ring(step.tokens);
    CHECK(foreign == (!begins && reads && owner_ != sequence.id));
    if (foreign) return true;
    keep_state(step);
    if (begins) owner_ = sequence.id;
    if (owner_ != sequence.id) return false;  // an empty step of a sequence without a ring
    store(sequence, change.kept, step.tokens);
    CHECK(state_.lost == (holds(sequence) ? 0 : 1));
    return false;
  }

  /// Does the ring hold all rows that a reader of the sequence takes from it?
  bool holds(const Sequence& sequence) const {
    for (int p = tokens_of(sequence).recent_begin; p < sequence.length(); ++p)
      if (names_[row(p)] != sequence.tokens[static_cast<std::size_t>(p)]) return false;
    return true;
  }

  const RingState& state() const { return state_; }
  int rows() const { return static_cast<int>(names_.size()); }

 private:
  std::size_t row(int position) const { return static_cast<std::size_t>(position) % names_.size(); }
  SequenceTokens tokens_of(const Sequence& s) const {
    return windows_.tokens_of(s.length(), s.exact_from, s.has_sinks, true);
  }

  /// The state that kernels keep. Applying the step to it again must change nothing.
  void keep_state(const RingStep& step) {
    state_ = ring_after(state_, step, rows());
    CHECK_FALSE(is_foreign(state_, step));
    const RingState again = ring_after(state_, step, rows());
    CHECK((again.owner == state_.owner && again.held_from == state_.held_from && again.lost == state_.lost));
  }

  /// Stores the step's tokens as formats/pages.md says, "Steps".
  void store(const Sequence& sequence, int before, const SequenceTokens& tokens) {
    const int first = std::max({before, tokens.sink_end, sequence.exact_from, tokens.length - rows()});
    for (int p = first; p < tokens.length; ++p) names_[row(p)] = sequence.tokens[static_cast<std::size_t>(p)];
  }

  WindowRule windows_;
  RingState state_ = {};
  std::vector<int> names_;  ///< of the token in each row
  std::uint64_t owner_ = 0;
  int next_name_ = 0;
};

struct Random {
  std::mt19937 bits;
  /// 0 .. most
  int up_to(int most) { return most <= 0 ? 0 : static_cast<int>(bits() % static_cast<unsigned>(most + 1)); }
  bool one_in(unsigned n) { return bits() % n == 0; }
};

/// A new sequence that begins with the tokens of a hit, or empty.
Sequence new_sequence(Random& random, std::uint64_t id, int most_hit) {
  Sequence sequence{.id = id, .has_sinks = random.one_in(2)};
  if (random.one_in(2)) sequence.exact_from = random.up_to(most_hit);
  sequence.tokens.assign(static_cast<std::size_t>(sequence.exact_from), -2);  // never in a ring
  return sequence;
}

int ring_rows(int recent, int rollback) { return (recent + rollback + 15) / 16 * 16; }

int new_tokens(Random& random, int rows) { return random.up_to(random.one_in(6) ? 3 * rows : 3); }

}  // namespace

TEST_CASE("While no more is taken back than the ring has room for, it holds every exact row", "[runtime]") {
  const int sinks = GENERATE(0, 5, 16, 21), recent = GENERATE(1, 7, 16, 40), rollback = GENERATE(0, 1, 9, 24);
  for (unsigned seed = 0; seed < 4; ++seed) {
    CAPTURE(sinks, recent, rollback, seed);
    Ring ring({sinks, recent}, ring_rows(recent, rollback));
    Random random{std::mt19937(seed)};
    for (std::uint64_t id = 1; id < 6; ++id) {
      Sequence sequence = new_sequence(random, id, 70);
      bool kept = !ring.step(sequence, {sequence.length(), new_tokens(random, ring.rows())});
      int longest = sequence.length();
      for (int step = 0; step < 40; ++step) {
        const int least = std::max(0, longest - rollback);
        const int before = std::max(least, sequence.length() - random.up_to(rollback));
        kept = kept && !ring.step(sequence, {before, new_tokens(random, ring.rows())});
        kept = kept && ring.state().lost == 0 && ring.holds(sequence);
        longest = std::max(longest, sequence.length());
      }
      CHECK(kept);
    }
  }
}

TEST_CASE("A ring says that rows are lost if more is taken back than it holds, whatever comes before", "[runtime]") {
  const int sinks = GENERATE(0, 5, 21), recent = GENERATE(1, 7, 16, 40), room = GENERATE(0, 9, 24);
  int lost = 0, kept = 0;
  for (unsigned seed = 0; seed < 10; ++seed) {
    CAPTURE(sinks, recent, room, seed);
    Ring ring({sinks, recent}, ring_rows(recent, room));
    Random random{std::mt19937(seed)};
    for (std::uint64_t id = 1; id < 15; ++id) {
      Sequence sequence = new_sequence(random, id, 70);
      bool told = !ring.step(sequence, {sequence.length(), new_tokens(random, ring.rows())});
      for (int step = 0; step < 12; ++step) {
        const int back = random.one_in(4) ? random.up_to(sequence.length()) : random.up_to(3);
        const int before = std::max(0, sequence.length() - back);
        told = told && !ring.step(sequence, {before, new_tokens(random, ring.rows())});
        told = told && (ring.state().lost == 1 || ring.holds(sequence));
        (ring.state().lost ? lost : kept) += 1;
      }
      CHECK(told);
    }
  }
  CHECK(lost > 10);
  CHECK(kept > 50);
}

TEST_CASE("A ring that another sequence took over is foreign and stays as it is", "[runtime]") {
  Ring ring({4, 16}, 32);
  Sequence first{.id = 7}, second{.id = 8, .exact_from = 20};
  CHECK_FALSE(ring.step(first, {0, 50}));
  CHECK(ring.holds(first));
  second.tokens.assign(20, -2);
  CHECK_FALSE(ring.step(second, {20, 5}));
  CHECK(ring.holds(second));
  CHECK(ring.step(first, {50, 1}));
  CHECK(ring.state().owner == 8);
  CHECK(ring.state().held_from == 20);
  CHECK_FALSE(ring.step(second, {25, 30}));
  CHECK(ring.holds(second));
  CHECK_FALSE(ring.step(first, {0, 3}));  // from the start again
  CHECK(ring.state().owner == 7);
}

TEST_CASE("A step takes the ring over exactly if it has no row of the sequence", "[runtime]") {
  for (const int exact_from : {0, 1, 30})
    for (int before = 0; before < 40; ++before) {
      CAPTURE(exact_from, before);
      const SequenceTokens tokens = WindowRule{0, 8}.tokens_of(before + 1, exact_from, false, true);
      const RingStep step{.owner = 3, .length_before = before, .exact_from = exact_from, .tokens = tokens};
      CHECK(takes_over(step) == (before <= exact_from));
      const RingState other{.owner = 2, .held_from = 1000, .lost = 1};
      CHECK(is_foreign(other, step) == (before > exact_from));
      if (before > exact_from) continue;
      const RingState after = ring_after(other, step, 16);
      CHECK((after.owner == 3 && after.held_from == std::max(exact_from, before + 1 - 16) && after.lost == 0));
    }
}

TEST_CASE("A step without tokens leaves another sequence's ring alone", "[runtime]") {
  // Such as a padding sequence of a captured batch, of length 0 and with any slot.
  const RingState other{.owner = 2, .held_from = 70, .lost = 0};
  for (const int length : {0, 20}) {
    const SequenceTokens tokens = WindowRule{0, 8}.tokens_of(length, length, false, true);
    const RingStep step{.owner = 3, .length_before = length, .exact_from = length, .tokens = tokens};
    CHECK_FALSE(takes_over(step));
    CHECK_FALSE(is_foreign(other, step));
    CHECK(ring_after(other, step, 16).owner == 2);
  }
}

TEST_CASE("Rows that were lost are forgotten once no reader needs them", "[runtime]") {
  Ring ring({0, 16}, 32);
  Sequence sequence{.id = 1};
  ring.step(sequence, {0, 100});
  ring.step(sequence, {60, 1});
  CHECK(ring.state().lost == 1);
  ring.step(sequence, {61, 19});
  CHECK(ring.state().lost == 0);
  ring.step(sequence, {80, 1});
  CHECK(ring.state().lost == 0);
  CHECK(ring.holds(sequence));
}

TEST_CASE("The last token that can be taken back is the last one that the ring has room for", "[runtime]") {
  const auto lost_after = [](int taken_back) {
    Ring ring({0, 16}, 32);
    Sequence sequence{.id = 1};
    ring.step(sequence, {0, 100});
    ring.step(sequence, {100 - taken_back, 1});
    return ring.state().lost;
  };
  CHECK(lost_after(16) == 0);
  CHECK(lost_after(17) == 0);  // the step's own token is recent, so one row less is read
  CHECK(lost_after(18) == 1);
}

TEST_CASE("Owners without numbers never make a ring foreign", "[runtime]") {
  const RingStep step{.owner = 0, .length_before = 5, .exact_from = 0, .tokens = {6, 0, 0}};
  CHECK_FALSE(is_foreign(RingState{}, step));
}
