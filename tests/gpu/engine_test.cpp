#include "api_expected.h"
#include "api_rig.h"

#include "support/served_artifact.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <random>
#include <string>

using namespace kvq;
using namespace kvq::test;

/// The life of pages, sinks and rings in an engine with prefix caching: attention equals that of a plain model that
/// knows which rows must be exact. Pages and slots that nobody holds are NaN, so that no stale row goes unseen.
namespace {

constexpr Windows kWindows{.sink_tokens = 20, .recent_tokens = 24};
constexpr int kLayer = 0, kMostDrafts = 6;
using Tokens = std::vector<std::int32_t>;

/// Token ids of a request: the first `shared` of them those of every request with the same document.
Tokens request(int document, int shared, int length, int own) {
  Tokens tokens;
  for (int p = 0; p < length; ++p) tokens.push_back(p < shared ? document * 1000 + p % 7 : 100000 + own * 1000 + p % 5);
  return tokens;
}

kvq_model_options small_pages() {
  auto options = runtime::init<kvq_model_options>();
  options.page_size = 16, options.max_step_tokens = kMostDrafts;
  return options;
}

class EngineModel {
 public:
  EngineModel(const Engine& engine, const Artifact& artifact, const runtime::PagedCacheOptions& options)
      : plan_(artifact.layers[kLayer]), options_(options), runner_(engine, kLayer, options, nullptr) {
    poison_free();
  }

  runtime::PagedCache& cache() { return runner_.cache; }
  const Expected& expected(int sequence) const { return sequences_.at(sequence).expected; }
  std::int64_t length(int sequence) const { return runner_.cache.allocator().length(sequence); }

  /// A sequence that will have these tokens, as far as steps take them. @return  kNone if there is no room
  int admit(const Tokens& tokens) {
    const CacheAllocator::Start start = runner_.cache.create(tokens);
    if (start.sequence == runtime::PagedCache::kNone) return start.sequence;
    begin(start.sequence, tokens);
    last_hit = start.hit_tokens;
    for (std::int64_t p = 0; p < start.hit_tokens; ++p) grow(start.sequence, p);
    return start.sequence;
  }
  int fork(int from, const Tokens& tokens) {
    const int made = runner_.cache.fork(from, nullptr);
    if (made == runtime::PagedCache::kNone) return made;
    const Expected copy = sequences_.at(from).expected;
    begin(made, tokens);
    sequences_[made].expected = copy;
    return made;
  }
  void rollback(int sequence, int tokens) {
    runner_.cache.rollback(sequence, tokens);
    Expected& s = sequences_.at(sequence).expected;
    s.k.erase(s.k.end() - tokens, s.k.end()), s.v.erase(s.v.end() - tokens, s.v.end());
  }
  /// The tokens that a sequence will have from here on.
  void retarget(int sequence, const Tokens& tokens) { begin(sequence, tokens, true); }
  void finish(int sequence) {
    runner_.cache.insert(sequence, sequences_.at(sequence).tokens);
    drop(sequence);
  }
  void drop(int sequence) {
    runner_.cache.destroy(sequence);
    sequences_.erase(sequence), runner_.tokens.erase(sequence);
    poison_free();
  }
  runtime::SavedSequence preempt(int sequence) {
    saved_expected_ = sequences_.at(sequence).expected, saved_tokens_ = sequences_.at(sequence).tokens;
    const runtime::SavedSequence saved = runner_.cache.save(sequence, nullptr);
    drop(sequence);
    return saved;
  }
  int restore(const runtime::SavedSequence& saved) {
    const int made = runner_.cache.restore(saved, nullptr);
    if (made == runtime::PagedCache::kNone) return made;
    begin(made, saved_tokens_);
    sequences_[made].expected = saved_expected_;
    return made;
  }

  /// Writes and attends; compares the results of all sequences. @return  false if there are not enough pages
  bool step(const std::vector<Growth>& batch) {
    if (!runner_.begin(batch)) return false;
    for (const Growth& g : batch)
      for (int i = 0; i < g.tokens; ++i)
        grow(g.sequence, static_cast<std::int64_t>(sequences_.at(g.sequence).expected.k.size()));
    poison_free();
    const Snapshot before = shared_pages();
    runner_.run();
    check_unchanged(before);
    compare_all(batch);
    const kvq_fault fault = runner_.cache.handle().fault(nullptr);
    CAPTURE(fault.sequence, fault.layer, fault.value);
    CHECK(std::string(kvq_fault_string(fault.code)) == "none");
    return true;
  }

  std::int64_t last_hit = 0;

 private:
  struct Sequence {
    Tokens tokens;
    Expected expected;
  };
  using Snapshot = std::map<std::int32_t, std::vector<std::byte>>;

  void begin(int sequence, const Tokens& tokens, bool keep = false) {
    if (!keep) sequences_[sequence] = {};
    sequences_[sequence].tokens = tokens, runner_.tokens[sequence] = tokens;
  }
  void grow(int sequence, std::int64_t p) {
    const std::uint64_t seed = runner_.seed_of(sequence, p);
    Expected& s = sequences_.at(sequence).expected;
    const auto known = rows_.find({seed, p});
    if (known != rows_.end()) {
      s.k.push_back(known->second.first), s.v.push_back(known->second.second);
      return;
    }
    s.grow(plan_, floats(runner_.key(seed, p)), floats(runner_.value(seed, p)));
    rows_.emplace(std::pair{seed, p}, std::pair{s.k.back(), s.v.back()});
  }
  void compare_all(const std::vector<Growth>& batch) {
    const std::vector<float> out = floats(runner_.results());
    const std::size_t each = static_cast<std::size_t>(plan_.geometry.num_q_heads) * kDim;
    for (std::size_t b = 0; b < batch.size(); ++b) {
      const int sequence = batch[b].sequence;
      Expected& s = sequences_.at(sequence).expected;
      s.exact_from = runner_.cache.allocator().exact_from(sequence);
      s.has_sinks = runner_.cache.allocator().sink_slot(sequence) != runtime::PagedCache::kNone;
      if (s.k.empty()) continue;
      const auto after = static_cast<std::int64_t>(s.k.size());
      const std::vector<float> q = floats(runner_.query(runner_.seed_of(sequence, after - 1), after));
      CAPTURE(sequence, after, s.exact_from, s.has_sinks);
      const Comparison found = compare(std::span(out).subspan(b * each, each), attend_expected(plan_, kWindows, s, q));
      CHECK(found.error <= found.allowed);
    }
  }
  std::byte* page(std::int32_t i) const { return runner_.cache.pages(kLayer) + i * runner_.info.page_bytes; }

  /// Makes everything NaN that nobody holds.
  void poison_free() {
    const CacheAllocator& a = runner_.cache.allocator();
    const auto poison = [](std::byte* at, std::int64_t bytes) {
      check_cuda(cudaMemset(at, 0xFF, static_cast<std::size_t>(bytes)), "cudaMemset");
    };
    for (std::int32_t i = 0; i < options_.num_pages; ++i)
      if (a.users(i) == 0) poison(page(i), runner_.info.page_bytes);
    for (std::int32_t i = 0; i < options_.num_sink_slots; ++i)
      if (a.sink_users(i) == 0)
        poison(runner_.cache.sinks(kLayer) + i * runner_.info.sink_slot_bytes, runner_.info.sink_slot_bytes);
    for (std::int32_t i = 0; i < options_.max_sequences; ++i)
      if (!sequences_.count(i))
        poison(runner_.cache.rings(kLayer) + i * runner_.info.ring_slot_bytes, runner_.info.ring_slot_bytes);
  }
  /// Bytes of the pages that more than one holds.
  Snapshot shared_pages() const {
    Snapshot all;
    for (std::int32_t i = 0; i < options_.num_pages; ++i) {
      if (runner_.cache.allocator().users(i) < 2) continue;
      std::vector<std::byte>& bytes = all[i];
      bytes.resize(static_cast<std::size_t>(runner_.info.page_bytes));
      check_cuda(cudaMemcpy(bytes.data(), page(i), bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    return all;
  }
  void check_unchanged(const Snapshot& before) const {
    for (const auto& [i, bytes] : before) {
      std::vector<std::byte> now(bytes.size());
      check_cuda(cudaMemcpy(now.data(), page(i), now.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
      CAPTURE(i);
      CHECK((now == bytes));
    }
  }

  const LayerPlan& plan_;
  runtime::PagedCacheOptions options_;
  LayerRunner runner_;
  std::map<int, Sequence> sequences_ = {};
  std::map<std::pair<std::uint64_t, std::int64_t>, std::pair<ExpectedRow, ExpectedRow>> rows_ = {};
  Expected saved_expected_;
  Tokens saved_tokens_;
};

struct Rig {
  Artifact artifact = served_artifact(kWindows, 0);
  Engine engine{artifact, small_pages()};
};

/// Sequences come, grow, take drafts back, finish and hit each other's pages, in random order.
void random_lives(unsigned seed, int rounds) {
  const Rig rig;
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
  EngineModel model(
      rig.engine, rig.artifact,
      {.num_pages = 30, .max_sequences = 5, .num_sink_slots = 3 + static_cast<int>(seed), .max_tokens = 200});
  std::vector<int> live;
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(seed, round);
    if (live.size() < 4 && random() % 2) {
      const int made = model.admit(request(up_to(1), up_to(90), 400, round));
      if (made >= 0) live.push_back(made);
    }
    if (live.empty()) continue;
    if (random() % 6 == 0) {
      const auto i = static_cast<std::size_t>(up_to(static_cast<int>(live.size()) - 1));
      random() % 3 ? model.finish(live[i]) : model.drop(live[i]);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      if (live.empty()) continue;
    }
    std::vector<Growth> batch;
    for (const int s : live)
      if (model.length(s) < 150) batch.push_back({s, up_to(2) ? up_to(3) : up_to(40)});
    if (batch.empty()) continue;
    if (!model.step(batch)) {  // no pages left: somebody has to go
      model.finish(live.back()), live.pop_back();
      continue;
    }
    for (const Growth& g : batch) {
      const int most =
          std::min({g.tokens, kMostDrafts, static_cast<int>(model.cache().allocator().uncommitted(g.sequence))});
      if (random() % 3 == 0) model.rollback(g.sequence, up_to(most));
    }
  }
}

}  // namespace

TEST_CASE("A hit at every offset around borders of pages and windows attends as its tokens say",
          "[runtime][gpu][engine][emulated]") {
  const Rig rig;
  const int donor_length = GENERATE(33, 64);
  EngineModel model(rig.engine, rig.artifact,
                    {.num_pages = 24, .max_sequences = 3, .num_sink_slots = 4, .max_tokens = 100});
  const Tokens document = request(1, 200, 200, 0);
  const int donor = model.admit(document);
  REQUIRE(model.step({{donor, donor_length}}));
  model.finish(donor);  // the donor is gone: its ring is NaN
  int own = 1;
  for (const int shared : {1, 16, 19, 20, 31, 32, 33, 47, 48, 63, 64})
    for (const int fresh : {1, 30}) {
      CAPTURE(donor_length, shared, fresh);
      const Tokens tokens = request(1, shared, std::max(shared, donor_length) + fresh + 2, own++);
      const int sequence = model.admit(tokens);
      REQUIRE(sequence >= 0);
      const int whole = std::min(shared, donor_length) / 16 * 16;
      CHECK(model.last_hit == (whole < kWindows.sink_tokens ? 0 : whole));
      REQUIRE(model.step({{sequence, fresh}}));
      REQUIRE(model.step({{sequence, 1}}));
      REQUIRE(model.step({{sequence, 0}}));
      model.drop(sequence);
    }
}

TEST_CASE("A prompt may be cut into chunks anywhere, and hit by a second request at once",
          "[runtime][gpu][engine][emulated]") {
  const Rig rig;
  const Tokens document = request(2, 200, 200, 0);
  for (const std::vector<int>& chunks : {std::vector{70}, {1, 69}, {19, 1, 1, 49}, {25, 45}, {16, 16, 16, 16, 6}}) {
    CAPTURE(chunks);
    EngineModel model(rig.engine, rig.artifact,
                      {.num_pages = 24, .max_sequences = 3, .num_sink_slots = 4, .max_tokens = 100});
    const int first = model.admit(document);
    for (const int n : chunks) REQUIRE(model.step({{first, n}}));
    model.cache().insert(first, document);  // while the first one goes on
    const int second = model.admit(request(2, 60, 100, 9));
    CHECK(model.last_hit == 48);
    REQUIRE(model.step({{second, 20}, {first, 1}}));
    REQUIRE(model.step({{first, 1}, {second, 1}}));
  }
}

TEST_CASE("Forks of forks, drafts taken back, preemption and restore", "[runtime][gpu][engine][emulated]") {
  const Rig rig;
  EngineModel model(rig.engine, rig.artifact,
                    {.num_pages = 40, .max_sequences = 5, .num_sink_slots = 6, .max_tokens = 120});
  const int a = model.admit(request(3, 300, 300, 0));
  const int length = GENERATE(5, 18, 45);
  REQUIRE(model.step({{a, length}}));
  const int b = model.fork(a, request(3, length, 300, 1));
  REQUIRE(model.step({{b, 3}, {a, 2}}));
  const int c = model.fork(b, request(3, length, 300, 1));
  model.retarget(c, [&] {
    Tokens tokens = request(3, length, length + 3, 1), rest = request(3, 0, 300, 2);
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    return tokens;
  }());
  REQUIRE(model.step({{c, 7}, {a, 1}, {b, 1}}));
  for (int drafts = 1; drafts <= kMostDrafts; ++drafts) {
    REQUIRE(model.step({{c, drafts}, {b, kMostDrafts}}));
    model.rollback(c, drafts), model.rollback(b, drafts);
    REQUIRE(model.step({{c, 1}, {b, 0}, {a, 1}}));
  }
  const runtime::SavedSequence saved = model.preempt(b);
  const int taker = model.admit(request(4, 100, 100, 7));  // takes the ring that b had
  CHECK(taker == b);
  REQUIRE(model.step({{taker, 50}, {c, 1}}));
  const int again = model.restore(saved);
  REQUIRE(again >= 0);
  REQUIRE(model.step({{again, 2}, {taker, 1}, {a, 1}}));
  REQUIRE(model.step({{again, kMostDrafts}}));
  model.rollback(again, kMostDrafts);
  REQUIRE(model.step({{again, 1}}));
}

TEST_CASE("Random lives of sequences", "[runtime][gpu][engine]") { random_lives(GENERATE(range(1u, 9u)), 80); }

TEST_CASE("A random life, in short", "[runtime][gpu][engine][emulated]") { random_lives(3, 40); }
