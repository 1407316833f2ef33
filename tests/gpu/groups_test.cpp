#include "api_rig.h"

#include "support/served_artifact.h"

#include <kvq/core/dtype.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

/// Groups of layers in a PagedCache, of which those with sliding windows give back the pages behind them, or keep none.
/// Attention is as in a cache that keeps all pages, though pages that nobody holds are NaN.
using namespace kvq;
using namespace kvq::test;

namespace {

constexpr Windows kShort = {.sink_tokens = 20, .recent_tokens = 24};
constexpr int kHeads = 16, kKvHeads = 4, kDim = 128, kPageSize = 16, kDrafts = 4, kMostTokens = 160, kSequences = 4;
using Tokens = std::vector<std::int32_t>;

/// Layers in groups, and one of each that attends.
struct Shape {
  std::vector<int> windows;
  std::vector<runtime::LayerGroup> groups;
  std::vector<int> attend;
};

Artifact hybrid_artifact(const std::vector<int>& windows) {
  Artifact artifact = served_artifact(kShort, 0);
  for (std::size_t layer = 0; layer < windows.size(); ++layer)
    artifact.layers[layer].geometry.sliding_window = windows[layer];
  return artifact;
}

kvq_model_options hybrid_options() {
  auto options = runtime::init<kvq_model_options>();
  options.page_size = kPageSize, options.max_step_tokens = kDrafts;
  return options;
}

kvq_plan_options hybrid_plan(int most_new) {
  kvq_plan_options options = plan_options(kSequences);
  options.max_new_tokens = most_new;
  return options;
}

/// A PagedCache with groups. Its free pages are NaN.
class GroupedCache {
 public:
  GroupedCache(const Engine& engine, const Shape& shape, const runtime::PagedCacheOptions& options)
      : cache(*engine.model, *engine.device_model, options, nullptr),
        engine_(engine),
        attend_(shape.attend),
        options_(options),
        one_(*engine.model, hybrid_plan(1)),
        several_(*engine.model, hybrid_plan(kDrafts)),
        workspace_(std::max(one_.workspace_bytes(KVQ_KERNEL_DECODE), several_.workspace_bytes(KVQ_KERNEL_DECODE))) {
    poison();
  }

  /// @return  results of each layer that attends; none if there are not enough pages
  std::vector<std::vector<std::uint16_t>> step(const std::vector<Growth>& batch, const std::vector<Tokens>& rows) {
    if (!cache.step(batch, nullptr)) return {};
    poison();
    std::vector<std::uint16_t> k, v, q;
    int tokens = 0;
    bool drafts = true;
    for (std::size_t b = 0; b < batch.size(); ++b) {
      for (const std::int32_t row : rows[b]) {
        add(k, random_rows(1, kKvHeads * kDim, 3 * static_cast<unsigned>(row)));
        add(v, random_rows(1, kKvHeads * kDim, 3 * static_cast<unsigned>(row) + 1));
      }
      tokens += batch[b].tokens;
      drafts = drafts && batch[b].tokens <= kDrafts;
    }
    const int queries = drafts ? tokens : static_cast<int>(batch.size());
    q = random_rows(queries, kHeads * kDim, 7);
    const DeviceMemory k_rows = to_device<std::uint16_t>(k, nullptr), v_rows = to_device<std::uint16_t>(v, nullptr),
                       q_rows = to_device<std::uint16_t>(q, nullptr);
    auto error = runtime::init<kvq_error>();
    std::vector<std::vector<std::uint16_t>> results;
    for (const int layer : attend_) {
      const std::int32_t group = cache.group_of(layer);
      kvq_write_args w = cache.write_args(group);
      w.k = k_rows.get(), w.v = v_rows.get();
      expect_ok(one_.write(cache.handle(), layer, w, nullptr, &error), error);
      results.emplace_back(static_cast<std::size_t>(queries) * kHeads * kDim);
      const DeviceMemory out(results.back().size() * 2);
      kvq_decode_args d = cache.decode_args(group);
      d.q = q_rows.get(), d.out = out.get(), d.workspace = workspace_.get(), d.workspace_bytes = workspace_.bytes();
      if (drafts) d.q_indptr = cache.prefill_args(group).q_indptr, d.num_tokens = queries;
      if (queries == 0) continue;
      expect_ok((drafts ? several_ : one_).decode(cache.handle(), layer, d, nullptr, &error), error);
      to_host<std::uint16_t>(out, results.back(), nullptr);
    }
    const kvq_fault fault = cache.handle().fault(nullptr);
    CAPTURE(fault.sequence, fault.layer, fault.value);
    CHECK(std::string(kvq_fault_string(fault.code)) == "none");
    return results;
  }

  /// A chunk of one sequence. @param before  does it attend before it is written?  @return  as step()
  std::vector<std::vector<std::uint16_t>> chunk(const runtime::Plan& plan, int tokens, bool before) {
    REQUIRE(cache.step(std::vector<Growth>{{0, tokens}}, nullptr));
    poison();
    const unsigned seed = static_cast<unsigned>(cache.allocator().length(0));
    const DeviceMemory k = to_device<std::uint16_t>(random_rows(tokens, kKvHeads * kDim, seed), nullptr),
                       v = to_device<std::uint16_t>(random_rows(tokens, kKvHeads * kDim, seed + 1), nullptr),
                       q = to_device<std::uint16_t>(random_rows(tokens, kHeads * kDim, seed + 2), nullptr),
                       workspace(plan.workspace_bytes(KVQ_KERNEL_PREFILL));
    auto error = runtime::init<kvq_error>();
    std::vector<std::vector<std::uint16_t>> results;
    for (const int layer : attend_) {
      const std::int32_t group = cache.group_of(layer);
      results.emplace_back(static_cast<std::size_t>(tokens) * kHeads * kDim);
      const DeviceMemory out(results.back().size() * 2);
      kvq_write_args w = cache.write_args(group);
      w.k = k.get(), w.v = v.get();
      kvq_prefill_args a = before ? cache.prefill_before_write_args(group) : cache.prefill_args(group);
      a.q = q.get(), a.k = k.get(), a.v = v.get(), a.out = out.get();
      a.workspace = workspace.get(), a.workspace_bytes = workspace.bytes();
      const auto write = [&] { expect_ok(plan.write(cache.handle(), layer, w, nullptr, &error), error); };
      if (!before) write();
      expect_ok(plan.prefill(cache.handle(), layer, a, nullptr, &error), error);
      if (before) write();
      to_host<std::uint16_t>(out, results.back(), nullptr);
    }
    return results;
  }

  runtime::PagedCache cache;

 private:
  static void add(std::vector<std::uint16_t>& to, const std::vector<std::uint16_t>& more) {
    to.insert(to.end(), more.begin(), more.end());
  }
  void poison() const {
    for (const int layer : attend_) {
      const std::int32_t group = cache.group_of(layer);
      const auto bytes = static_cast<std::size_t>(engine_.model->layer(layer).page_bytes);
      const CacheAllocator& a = cache.allocator();
      const int count =
          options_.groups.empty() ? options_.num_pages : options_.groups[static_cast<std::size_t>(group)].num_pages;
      for (int page = 0; page < count; ++page)
        if (a.users(page, group) == 0)
          check_cuda(cudaMemset(cache.pages(layer) + static_cast<std::size_t>(page) * bytes, 0xFF, bytes),
                     "cudaMemset");
    }
  }
  const Engine& engine_;
  std::vector<int> attend_;
  runtime::PagedCacheOptions options_;
  runtime::Plan one_, several_;
  DeviceMemory workspace_;
};

/// Random lives of sequences in a cache with groups, beside a cache that keeps all pages: attention is the same.
class Lives {
 public:
  Lives(const Shape& shape, unsigned seed)
      : engine_(hybrid_artifact(shape.windows), hybrid_options()),
        groups_(engine_, shape, options(0, shape.groups)),
        all_(engine_, shape, options(100, {})),
        random_(seed) {}

  void round() {
    if (tokens_.size() < 3 && up_to(1)) begin();
    if (tokens_.empty()) return;
    const std::int32_t any = std::next(tokens_.begin(), up_to(static_cast<int>(tokens_.size()) - 1))->first;
    const int action = up_to(9);
    if (action == 0) end(any);
    if (action == 1) move(any);
    if (action >= 2 && action <= 4) fork(any);
    grow();
    for (auto& [sequence, own] : tokens_) {
      const int back = up_to(2) ? 0 : up_to(static_cast<int>(groups_.cache.allocator().uncommitted(sequence)));
      groups_.cache.rollback(sequence, back), all_.cache.rollback(sequence, back);
      own.resize(own.size() - static_cast<std::size_t>(back));
      if (up_to(1)) insert(sequence);
    }
  }

  int hits = 0, refusals = 0, released = 0, moves = 0, forks = 0;

 private:
  static runtime::PagedCacheOptions options(std::int32_t num_pages, const std::vector<runtime::LayerGroup>& groups) {
    return {.num_pages = num_pages,
            .max_sequences = kSequences,
            .num_sink_slots = 12,
            .max_tokens = kMostTokens,
            .groups = groups};
  }
  int up_to(int most) { return static_cast<int>(random_() % static_cast<unsigned>(most + 1)); }

  void begin() {
    Tokens tokens;  // two documents, which are left somewhere
    const int document = up_to(1), shared = up_to(110);
    for (int p = 0; p < 112; ++p) tokens.push_back(p < shared ? document * 1000 + p : 5000 + up_to(1000));
    CacheAllocator::Start start = groups_.cache.create(tokens);
    if (start.sequence < 0) return;
    const auto same = [&](const CacheAllocator::Start& other) {
      return other.hit_tokens == start.hit_tokens &&
             has_sinks(all_, other.sequence) == has_sinks(groups_, start.sequence);
    };
    CacheAllocator::Start other = all_.cache.create(tokens);
    if (!same(other)) {  // the tree of all pages has more of them: ask it for as many as the groups have
      all_.cache.destroy(other.sequence);
      other = all_.cache.create(Tokens(tokens.begin(), tokens.begin() + start.hit_tokens + 1));
    }
    if (!same(other)) {
      groups_.cache.destroy(start.sequence), all_.cache.destroy(other.sequence);
      start = {.sequence = groups_.cache.create()};
      REQUIRE(all_.cache.create() == start.sequence);
    }
    hits += start.hit_tokens > 0;
    tokens.resize(static_cast<std::size_t>(start.hit_tokens));
    tokens_[start.sequence] = tokens, documents_[start.sequence] = document;
  }
  static bool has_sinks(const GroupedCache& side, std::int32_t sequence) {
    return side.cache.allocator().sink_slot(sequence) >= 0;
  }
  void end(std::int32_t sequence) {
    groups_.cache.destroy(sequence), all_.cache.destroy(sequence);
    tokens_.erase(sequence);
  }
  void insert(std::int32_t sequence) {
    groups_.cache.insert(sequence, tokens_.at(sequence)), all_.cache.insert(sequence, tokens_.at(sequence));
  }
  void fork(std::int32_t sequence) {
    const std::int32_t made = groups_.cache.fork(sequence, nullptr);
    REQUIRE(all_.cache.fork(sequence, nullptr) == made);
    if (made < 0) return;
    ++forks;
    tokens_[made] = tokens_.at(sequence), documents_[made] = 2;
  }
  /// To the host and back.
  void move(std::int32_t sequence) {
    const runtime::SavedSequence some = groups_.cache.save(sequence, nullptr), all = all_.cache.save(sequence, nullptr);
    const Tokens tokens = tokens_.at(sequence);
    end(sequence);
    // Pages that it shared before are its own now, so there may be too few.
    const bool has_room = can_restore(static_cast<std::int64_t>(tokens.size()));
    const std::int32_t made = groups_.cache.restore(some, nullptr);
    REQUIRE((made >= 0) == has_room);
    if (!has_room) {
      ++refusals;
      return;
    }
    REQUIRE(all_.cache.restore(all, nullptr) == made);
    tokens_[made] = tokens;
    ++moves;
  }
  bool can_restore(std::int64_t length) const {
    const CacheAllocator& a = groups_.cache.allocator();
    const std::int64_t pages = (length + kPageSize - 1) / kPageSize;
    for (std::int32_t group = 0; group < a.groups(); ++group)
      if (pages - a.first_page(length, group) > a.free_pages(group) + a.evictable_pages(group)) return false;
    return true;
  }
  void grow() {
    const bool chunks = up_to(3) == 0;
    std::vector<Growth> batch;
    std::vector<Tokens> rows;
    for (const auto& [sequence, own] : tokens_) {
      if (own.size() > 150) continue;
      batch.push_back({sequence, chunks ? up_to(40) : up_to(kDrafts)});
      rows.emplace_back();
      for (int i = 0; i < batch.back().tokens; ++i) {
        const int p = static_cast<int>(own.size()) + i, document = documents_[sequence];
        rows.back().push_back(document < 2 && p < 110 ? document * 1000 + p : 5000 + up_to(1000));
      }
    }
    std::vector<std::int32_t> before;
    for (std::int32_t group = 0; group < groups_.cache.allocator().groups(); ++group) before.push_back(holes(group));
    const auto found = groups_.step(batch, rows);
    if (found.empty()) {
      ++refusals;
      return end(tokens_.rbegin()->first);
    }
    for (std::int32_t group = 0; group < groups_.cache.allocator().groups(); ++group)
      released += holes(group) > before[static_cast<std::size_t>(group)];
    CHECK((found == all_.step(batch, rows)));
    for (std::size_t b = 0; b < batch.size(); ++b) {
      Tokens& own = tokens_.at(batch[b].sequence);
      own.insert(own.end(), rows[b].begin(), rows[b].end());
    }
  }
  std::int32_t holes(std::int32_t group) const {
    std::int32_t count = 0;
    for (const auto& entry : tokens_) {
      const auto pages = groups_.cache.allocator().pages(entry.first, group);
      count += static_cast<std::int32_t>(std::count(pages.begin(), pages.end(), -1));
    }
    return count;
  }

  Engine engine_;
  GroupedCache groups_, all_;
  std::mt19937 random_;
  std::map<std::int32_t, Tokens> tokens_ = {};
  std::map<std::int32_t, int> documents_ = {};
};

/// Five layers with a window for each with full attention.
Shape five_to_one() {
  return {.windows = {50, 50, 50, 50, 50, 0},
          .groups = {{.layers = {5}, .num_pages = 24}, {.layers = {0, 1, 2, 3, 4}, .num_pages = 16}},
          .attend = {5, 0, 2}};
}
/// One for one. The windows of two layers are in the ring, for the first of some drafts, too.
Shape one_to_one() {
  constexpr int kInRing = kShort.recent_tokens - kDrafts + 1;
  return {.windows = {0, kInRing, 0, kInRing, 0, 50},
          .groups = {{.layers = {1, 3}}, {.layers = {0, 2, 4}, .num_pages = 20}, {.layers = {5}, .num_pages = 16}},
          .attend = {0, 1, 5}};
}

void random_lives(const Shape& shape, unsigned seed, int rounds, bool with_hits) {
  Lives lives(shape, seed);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(seed, round);
    lives.round();
  }
  CAPTURE(seed, lives.hits, lives.refusals, lives.moves, lives.forks, lives.released);
  CHECK((lives.hits > 0) == with_hits);
  CHECK(lives.refusals > 0);
  CHECK(lives.moves > 0);
  CHECK(lives.forks > 2);
  CHECK(lives.released > 0);
}

}  // namespace

TEST_CASE("Five layers with windows and one without attend as if all pages were kept",
          "[runtime][gpu][engine][emulated]") {
  random_lives(five_to_one(), 1, 24, true);
}

TEST_CASE("Layers with and without windows, some within the ring, attend as if all pages were kept",
          "[runtime][gpu][engine][emulated]") {
  random_lives(one_to_one(), 2, 40, false);
}

TEST_CASE("Random lives in caches with groups", "[runtime][gpu][engine]") {
  const unsigned seed = GENERATE(range(3u, 9u));
  random_lives(five_to_one(), seed, 150, true);
  random_lives(one_to_one(), seed, 150, false);
}

TEST_CASE("Without pages a long chunk attends before it is written", "[runtime][gpu][engine][emulated]") {
  const Shape shape = one_to_one();
  const Engine engine(hybrid_artifact(shape.windows), hybrid_options());
  const runtime::PagedCacheOptions room{.max_sequences = 1, .max_tokens = kMostTokens, .groups = shape.groups},
      all_pages{.num_pages = 20, .max_sequences = 1, .max_tokens = kMostTokens};
  const bool before = GENERATE(true, false);
  GroupedCache groups(engine, shape, room), all(engine, shape, all_pages);
  const runtime::Plan plan(*engine.model, plan_options(1, 70, 200));
  REQUIRE(groups.cache.create() == 0);
  REQUIRE(all.cache.create() == 0);
  for (const int tokens : {30, 41, 70}) {
    CAPTURE(tokens);
    const bool first = groups.cache.allocator().length(0) == 0;
    const auto found = groups.chunk(plan, tokens, before), expected = all.chunk(plan, tokens, before);
    CHECK((found[0] == expected[0]));
    CHECK((found[2] == expected[2]));
    CHECK((found[1] == expected[1]) == (before || first));
    CHECK(groups.cache.handle().fault(nullptr).code == (before || first ? KVQ_FAULT_NONE : KVQ_FAULT_PAGE));
    CHECK(std::isnan(bf16_to_float(found[1][0])) == !(before || first));
    CHECK(all.cache.handle().fault(nullptr).code == KVQ_FAULT_NONE);
  }
}

TEST_CASE("Groups that do not fit the model are refused", "[runtime][gpu][engine][emulated]") {
  const Engine engine(hybrid_artifact({50, 50, 50, 50, 24, 0}), hybrid_options());
  const auto refused = [&](std::vector<runtime::LayerGroup> groups, const std::string& message,
                           std::int32_t num_pages = 0) {
    const runtime::PagedCacheOptions options{.num_pages = num_pages, .max_sequences = 1, .groups = std::move(groups)};
    CHECK_THROWS_WITH(runtime::PagedCache(*engine.model, *engine.device_model, options, nullptr),
                      "paged cache: " + message);
  };
  refused({{.layers = {5}, .num_pages = 4}, {.layers = {0, 1, 2, 3}, .num_pages = 4}},
          "layer 4: expected one group, found none");
  refused({{.layers = {5, 4}, .num_pages = 4}, {.layers = {0, 1, 2, 3, 4}, .num_pages = 4}},
          "layer 4: expected one group, found 0 and 1");
  refused({{.layers = {0, 1, 2, 3, 4, 5, 6}, .num_pages = 4}}, "group 0: layer: expected 0 to 5, found 6");
  refused({{.layers = {5}}, {.layers = {0, 1, 2, 3, 4}, .num_pages = 4}},
          "group 0: num_pages: expected 1 or more, or 0 with a sliding window of at most 24 tokens; found 0 with a "
          "window of 0");
  refused({{.layers = {5}, .num_pages = 4}, {.layers = {0, 1, 2, 3, 4}}},
          "group 1: num_pages: expected 1 or more, or 0 with a sliding window of at most 24 tokens; found 0 with a "
          "window of 50");
  refused({{.layers = {0, 1, 2, 3, 4, 5}, .num_pages = 4}}, "expected num_pages or groups, found 3 pages and 1 groups",
          3);
  refused({}, "0 pages and 1 sequences: expected 1 or more");
  const runtime::PagedCache cache(
      *engine.model, *engine.device_model,
      {.max_sequences = 1, .groups = {{.layers = {4}}, {.layers = {5, 0, 1, 2, 3}, .num_pages = 4}}}, nullptr);
  CHECK(cache.group_of(4) == 0);
  CHECK(cache.group_of(0) == 1);
  CHECK(cache.pages(4) == nullptr);
  CHECK_THROWS_WITH(cache.decode_args(2), "paged cache: group: expected 0 to 1, found 2");
}
