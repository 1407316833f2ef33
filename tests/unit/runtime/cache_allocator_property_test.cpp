#include <kvq/runtime/cache_allocator.h>

#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

/// A random schedule of all calls, beside a memory that holds for each row of a page, sink slot or ring slot which
/// token was written there last: not only its number, but all tokens before it too. After each call every sequence, and
/// the tree, must find in memory what they believe to have, in every group of layers: of a sliding window, what a query
/// may still see, and not a page more. What calls answer is compared with naive counts of what live sequences hold, so
/// the tree may never be the reason of a refusal.

using namespace kvq;

namespace {

constexpr std::int32_t kNone = CacheAllocator::kNone;
using Tokens = std::vector<std::int32_t>;

struct Shape {
  CacheAllocatorOptions options;
  int recent_tokens = 0;
  int ring_rows() const { return recent_tokens + options.max_rollback; }
  /// At least one: the allocator's groups, as it must understand its options.
  std::vector<PageGroup> groups() const {
    return options.groups.empty() ? std::vector<PageGroup>{{.num_pages = options.num_pages}} : options.groups;
  }
};

bool keeps_pages(const PageGroup& group) { return group.num_pages > 0 || group.sliding_window == 0; }

Shape random_shape(test::Random& random) {
  Shape shape{.options = {.num_pages = random.integer(1, 60),
                          .page_size = random.integer(1, 5),
                          .num_sequences = random.integer(1, 6),
                          .num_sink_slots = random.integer(0, 4),
                          .sink_tokens = random.integer(0, 2) ? random.integer(1, 9) : 0,
                          .max_rollback = random.integer(0, 1) ? random.integer(0, 16) : 16},
              .recent_tokens = random.integer(0, 6)};
  if (random.integer(0, 2) == 0) return shape;
  for (int group = random.integer(1, 3); group > 0; --group)
    shape.options.groups.push_back({.num_pages = random.integer(0, 9) ? random.integer(1, 60) : 0,
                                    .sliding_window = random.integer(0, 2) ? random.integer(1, 12) : 0});
  shape.options.num_pages = 0;
  return shape;
}

/// Numbers for tokens with all that comes before them.
class Identities {
 public:
  std::int32_t of(std::int32_t before, std::int32_t token) {
    return known_.try_emplace({before, token}, static_cast<std::int32_t>(known_.size()) + 1).first->second;
  }

 private:
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> known_;
};

struct Live {
  Tokens tokens = {}, ids = {};
  int drafts = 0;  ///< tokens that may be taken back
  std::int64_t exact_from = 0;
  std::int64_t least = 0;  ///< length before the last growth, or that to which it could be taken back
};

/// A sequence that was copied elsewhere and destroyed.
struct Saved {
  Live live;
  bool has_sinks = false;
  Tokens page_rows = {};  ///< by group and position, of the pages that are needed
  Tokens sink_rows = {}, ring_rows = {};
};

enum Event {
  hits,
  hits_without_donor,
  hits_without_sinks,
  page_copies,
  page_copies_for_tree,
  sink_copies,
  sinks_lost,
  entries_forgotten_by_grow,
  evictions,
  refusals_to_grow,
  refusals_to_restore,
  restores,
  forks_amid_sinks,
  pages_released,
  pages_released_to_tree,
  pages_given_out_again_at_once,
  hits_behind_windows,
  insertions_cut_short,
  kEvents
};

class Model {
 public:
  Model(const Shape& shape, std::uint64_t seed, std::array<int, kEvents>& events)
      : random_(seed),
        events_(events),
        shape_(shape),
        o_(shape.options),
        groups_(shape.groups()),
        allocator_(shape.options) {
    const auto rows = [](int slots, int each) {
      return Tokens(static_cast<std::size_t>(slots) * static_cast<std::size_t>(each));
    };
    for (const PageGroup& group : groups_) pages_.push_back(rows(group.num_pages, o_.page_size));
    sinks_ = rows(o_.num_sink_slots, o_.sink_tokens);
    rings_ = rows(o_.num_sequences, shape.ring_rows());
  }

  void step() {
    const int action = random_.integer(0, 23);
    if (action == 0 || live_.empty())
      create();
    else if (action <= 3)
      create_with_tokens(prompt());
    else if (action <= 6)
      insert(any());
    else if (action == 7 && random_.integer(0, 1))
      destroy(any());
    else if (action == 8)
      fork(any());
    else if (action <= 12)
      rollback(any());
    else if (action == 13)
      commit(any());
    else if (action == 14 && random_.integer(0, 3) == 0)
      evict();
    else if (action == 15)
      save(any());
    else if (action == 16)
      restore();
    else if (action <= 19)
      insert_drafts();
    else
      grow();
    check_sequences();
    check_tree();
    check_references();
  }

 private:
  // Memory.

  int rows_of(CopyKind kind) const {
    return kind == CopyKind::page ? o_.page_size : kind == CopyKind::sink ? o_.sink_tokens : shape_.ring_rows();
  }
  std::int32_t& cell(CopyKind kind, std::int32_t slot, std::int64_t row, int group = 0) {
    REQUIRE(slot >= 0);
    Tokens& memory = kind == CopyKind::page ? pages_[at(group)] : kind == CopyKind::sink ? sinks_ : rings_;
    return memory.at(static_cast<std::size_t>(std::int64_t{slot} * rows_of(kind) + row));
  }
  std::int32_t page_cell(std::int32_t sequence, std::int64_t position, int group) {
    const auto pages = allocator_.pages(sequence, group);
    return cell(CopyKind::page, pages[static_cast<std::size_t>(position / o_.page_size)], position % o_.page_size,
                group);
  }
  void copy_all(const std::vector<CacheCopy>& copies) {
    std::set<std::tuple<CopyKind, std::int32_t, std::int32_t>> sources, targets;
    for (const CacheCopy& c : copies) {
      sources.insert({c.kind, c.group, c.from});
      REQUIRE(targets.insert({c.kind, c.group, c.to}).second);
      for (int row = 0; row < rows_of(c.kind); ++row)
        cell(c.kind, c.to, row, c.group) = cell(c.kind, c.from, row, c.group);
    }
    for (const auto& target : targets) REQUIRE(sources.count(target) == 0);  // so any order will do
  }

  /// Who sees this page, sink slot or ring slot, by walking all there is.
  int viewers(CopyKind kind, std::int32_t slot, int group = 0) const {
    int count = 0;
    for (const auto& entry : live_) {
      const auto pages = allocator_.pages(entry.first, group);
      count += kind == CopyKind::page   ? static_cast<int>(std::count(pages.begin(), pages.end(), slot))
               : kind == CopyKind::sink ? allocator_.sink_slot(entry.first) == slot
                                        : entry.first == slot;
    }
    for (const std::int32_t id : allocator_.tree().ids())
      count += (kind == CopyKind::page && allocator_.tree().at(id).pages[at(group)] == slot) ||
               (kind == CopyKind::sink && allocator_.tree().at(id).sink == slot);
    return count;
  }
  void write(CopyKind kind, std::int32_t slot, std::int64_t row, std::int32_t id, int group = 0) {
    REQUIRE(viewers(kind, slot, group) == 1);
    cell(kind, slot, row, group) = id;
  }

  // Groups.

  static std::size_t at(int group) { return static_cast<std::size_t>(group); }
  int num_groups() const { return static_cast<int>(groups_.size()); }
  /// Of a sequence that is not shorter than `least` again, no query sees a token before this one. A query of the last
  /// token once more counts, too.
  std::int64_t first_seen(int group, std::int64_t least) const {
    const int window = groups_[at(group)].sliding_window;
    return window > 0 ? std::max<std::int64_t>(0, least - window) : 0;
  }
  bool has_page(int group, std::int64_t index, std::int64_t least) const {
    return keeps_pages(groups_[at(group)]) && (index + 1) * o_.page_size > first_seen(group, least);
  }
  std::int64_t least_after(const Growth& g) const {
    const Live& live = live_.at(g.sequence);
    const auto length = static_cast<std::int64_t>(live.ids.size());
    return std::min(length, length + g.tokens - std::min(live.drafts + g.tokens, o_.max_rollback));
  }
  /// Page tables as they are when the batch has released what it may.
  std::map<std::int32_t, Tokens> tables_after(const std::vector<Growth>& batch, int group) const {
    std::map<std::int32_t, Tokens> tables;
    for (const auto& entry : live_) {
      const auto pages = allocator_.pages(entry.first, group);
      tables[entry.first] = {pages.begin(), pages.end()};
    }
    for (const Growth& g : batch)
      for (std::size_t i = 0; i < tables[g.sequence].size(); ++i)
        if (!has_page(group, static_cast<std::int64_t>(i), least_after(g))) tables[g.sequence][i] = kNone;
    return tables;
  }
  static std::set<std::int32_t> held(const std::map<std::int32_t, Tokens>& tables) {
    std::set<std::int32_t> held;
    for (const auto& entry : tables) held.insert(entry.second.begin(), entry.second.end());
    held.erase(kNone);
    return held;
  }

  // What live sequences hold.

  std::set<std::int32_t> held_pages(int group) const { return held(tables_after({}, group)); }
  std::set<std::int32_t> held_sinks() const {
    std::set<std::int32_t> held;
    for (const auto& entry : live_)
      if (allocator_.sink_slot(entry.first) != kNone) held.insert(allocator_.sink_slot(entry.first));
    return held;
  }
  bool can_have_sink() const { return o_.sink_tokens > 0 && static_cast<int>(held_sinks().size()) < o_.num_sink_slots; }
  bool has_slot() const { return static_cast<int>(live_.size()) < o_.num_sequences; }
  std::int64_t pages_for(std::int64_t tokens) const { return (tokens + o_.page_size - 1) / o_.page_size; }

  /// All that can be seen from outside, to find that nothing changed.
  std::vector<std::int64_t> state() const {
    std::vector<std::int64_t> all = {allocator_.free_sink_slots()};
    for (int group = 0; group < num_groups(); ++group) all.push_back(allocator_.free_pages(group));
    for (const auto& entry : live_) {
      const std::int32_t s = entry.first;
      for (const std::int64_t value : {allocator_.length(s), allocator_.uncommitted(s), allocator_.exact_from(s),
                                       std::int64_t{allocator_.sink_slot(s)}})
        all.push_back(value);
      for (int group = 0; group < num_groups(); ++group)
        all.insert(all.end(), allocator_.pages(s, group).begin(), allocator_.pages(s, group).end());
    }
    const std::vector<std::int64_t> tree = tree_state();
    all.insert(all.end(), tree.begin(), tree.end());
    return all;
  }
  void require_state(const std::vector<std::int64_t>& expected) const { REQUIRE(state() == expected); }
  std::vector<std::int64_t> tree_state() const {
    std::vector<std::int64_t> all;
    for (const std::int32_t id : allocator_.tree().ids()) {
      const PrefixEntry& e = allocator_.tree().at(id);
      for (const std::int64_t value : {std::int64_t{id}, std::int64_t{e.sink}, e.last_used}) all.push_back(value);
      all.insert(all.end(), e.pages.begin(), e.pages.end());
    }
    return all;
  }

  // Calls.

  std::int32_t any() {
    auto it = live_.begin();
    std::advance(it, random_.integer(0, static_cast<int>(live_.size()) - 1));
    return it->first;
  }
  std::int32_t token() { return random_.integer(0, 9) ? 0 : random_.integer(1, 2); }
  void append(Live& live, std::int32_t token) {
    live.ids.push_back(identities_.of(live.ids.empty() ? 0 : live.ids.back(), token));
    live.tokens.push_back(token);
  }
  Tokens ids_of(const Tokens& tokens) {
    Live live;
    for (const std::int32_t t : tokens) append(live, t);
    return live.ids;
  }

  void create() {
    const bool slot = has_slot(), sink = can_have_sink();
    const auto before = state();
    const std::int32_t made = allocator_.create();
    REQUIRE((made != kNone) == slot);
    if (made == kNone) return require_state(before);
    REQUIRE(live_.emplace(made, Live{}).second);
    REQUIRE((allocator_.sink_slot(made) != kNone) == sink);
    if (sink) REQUIRE(allocator_.sink_users(allocator_.sink_slot(made)) == 1);
  }

  /// A prompt like one that was seen before, of any length.
  Tokens prompt() {
    Tokens tokens;
    if (!seen_.empty())
      tokens = seen_[static_cast<std::size_t>(random_.integer(0, static_cast<int>(seen_.size()) - 1))];
    if (!tokens.empty() && random_.integer(0, 2) == 0)
      tokens.resize(static_cast<std::size_t>(random_.integer(0, static_cast<int>(tokens.size()))));
    for (int more = random_.integer(0, 3); more > 0; --more) tokens.push_back(token());
    return tokens;
  }

  /// Entries, and the sink slot, of the longest match; by comparing all entries with all prefixes.
  std::pair<Tokens, std::int32_t> naive_match(const Tokens& tokens) {
    const Tokens ids = ids_of(tokens);
    Tokens path;
    std::int32_t sink = kNone;
    for (std::size_t end = static_cast<std::size_t>(o_.page_size); end < tokens.size();
         end += static_cast<std::size_t>(o_.page_size))
      for (const std::int32_t id : allocator_.tree().ids())
        if (ids_of(path_tokens(id)).back() == ids[end - 1]) {
          path.push_back(id);
          sink = std::max(sink, allocator_.tree().at(id).sink);
        }
    if (static_cast<int>(path.size()) * o_.page_size < o_.sink_tokens) return {{}, kNone};
    return {path, sink};
  }

  void create_with_tokens(const Tokens& tokens) {
    if (!has_slot() && random_.integer(0, 3)) destroy(any());
    const auto [path, sink] = naive_match(tokens);
    const bool slot = has_slot(), can_have = can_have_sink();
    const auto hit = static_cast<std::int64_t>(path.size()) * o_.page_size;
    std::vector<Tokens> pages;
    for (int group = 0; group < num_groups(); ++group) {
      pages.emplace_back();
      for (std::size_t i = 0; i < path.size(); ++i)
        pages.back().push_back(has_page(group, static_cast<std::int64_t>(i), hit)
                                   ? allocator_.tree().at(path[i]).pages[at(group)]
                                   : kNone);
    }
    const auto before = state();
    REQUIRE(allocator_.lookup(tokens) == hit);
    require_state(before);
    const auto held = held_pages(0);
    const CacheAllocator::Start start = allocator_.create(tokens);
    REQUIRE((start.sequence != kNone) == slot);
    if (!slot) return require_state(before);
    REQUIRE(start.hit_tokens == hit);
    Live made{.exact_from = hit, .least = hit};
    for (std::int64_t i = 0; i < hit; ++i) append(made, tokens[static_cast<std::size_t>(i)]);
    REQUIRE(live_.emplace(start.sequence, made).second);
    for (int group = 0; group < num_groups(); ++group) {
      REQUIRE(std::ranges::equal(allocator_.pages(start.sequence, group), pages[at(group)]));
      events_[hits_behind_windows] += hit > 0 && pages[at(group)][0] == kNone;
    }
    if (hit == 0) {
      REQUIRE((allocator_.sink_slot(start.sequence) != kNone) == can_have);
    } else {
      REQUIRE(allocator_.sink_slot(start.sequence) == sink);
      touch(made.ids);
      ++events_[hits];
      events_[hits_without_donor] += held.count(pages[0].back()) == 0;
      events_[hits_without_sinks] += o_.sink_tokens > 0 && sink == kNone;
    }
  }

  void touch(const Tokens& ids) {
    ++clock_;
    for (const std::int32_t id : ids) last_used_[id] = clock_;
  }

  void insert(std::int32_t sequence) {
    Tokens tokens = live_.at(sequence).tokens;
    if (random_.integer(0, 3) == 0)
      tokens.resize(static_cast<std::size_t>(random_.integer(0, static_cast<int>(tokens.size()))));
    else if (random_.integer(0, 1))
      tokens.resize(tokens.size() + static_cast<std::size_t>(random_.integer(0, 2 * o_.page_size)));
    Tokens own = tokens;
    own.resize(std::min(own.size(), live_.at(sequence).tokens.size()));
    std::size_t full = allocator_.tree().find(own).size();
    const auto has_all = [&] {  // pages of the next tokens, in all groups
      for (int group = 0; group < num_groups(); ++group)
        if (allocator_.pages(sequence, group)[full] == kNone) return false;
      return true;
    };
    while ((full + 1) * static_cast<std::size_t>(o_.page_size) <= own.size() && has_all()) ++full;
    events_[insertions_cut_short] += (full + 1) * static_cast<std::size_t>(o_.page_size) <= own.size();
    allocator_.insert(sequence, tokens);
    tokens = own;
    seen_.push_back(tokens);
    tokens.resize(full * static_cast<std::size_t>(o_.page_size));
    touch(ids_of(tokens));
    const std::vector<std::int32_t> path = allocator_.tree().find(own);
    REQUIRE(path.size() == full);
    const std::int64_t holder = (o_.sink_tokens + o_.page_size - 1) / o_.page_size - 1;
    if (o_.sink_tokens > 0 && holder < static_cast<std::int64_t>(full) && allocator_.sink_slot(sequence) != kNone)
      REQUIRE(allocator_.tree().at(path[static_cast<std::size_t>(holder)]).sink != kNone);
    const auto after = state();
    allocator_.insert(sequence, tokens);  // changes no more than who was used last
    touch(ids_of(tokens));
    REQUIRE(state().size() == after.size());
  }

  /// Tokens that are shared through the tree, taken back and written anew; if possible, sinks among them.
  void insert_drafts() {
    std::int32_t sequence = any();
    const std::int64_t sink_pages = pages_for(o_.sink_tokens) * o_.page_size;
    for (const auto& [one, live] : live_)
      if (allocator_.sink_slot(one) != kNone && allocator_.length(one) >= sink_pages &&
          allocator_.length(one) - live.drafts < o_.sink_tokens)
        sequence = one;
    Tokens tokens = live_.at(sequence).tokens;
    insert(sequence);
    for (int forks = random_.integer(0, 2); forks > 0; --forks) {
      tokens.push_back(token());
      create_with_tokens(tokens);
      if (live_.count(sequence) == 0) return;
    }
    rollback(sequence);
    if (random_.integer(0, 3)) grow();
  }

  void destroy(std::int32_t sequence) {
    seen_.push_back(live_.at(sequence).tokens);
    allocator_.destroy(sequence);
    live_.erase(sequence);
  }

  void fork(std::int32_t from) {
    const bool slot = has_slot(), sink = can_have_sink();
    const auto before = state();
    const CacheAllocator::Fork fork = allocator_.fork(from);
    REQUIRE((fork.sequence != kNone) == slot);
    if (!slot) return require_state(before);
    live_.at(from).drafts = 0;
    REQUIRE(live_.emplace(fork.sequence, live_.at(from)).second);
    const std::int32_t source = allocator_.sink_slot(from), target = allocator_.sink_slot(fork.sequence);
    const bool written = allocator_.length(from) >= o_.sink_tokens;
    if (source == kNone || written) REQUIRE(target == source);
    if (source != kNone && !written) {
      REQUIRE((target != kNone) == sink);
      if (sink) REQUIRE(viewers(CopyKind::sink, target) == 1);
      ++events_[forks_amid_sinks];
    }
    copy_all(fork.copies);
  }

  void rollback(std::int32_t sequence) {
    Live& live = live_.at(sequence);
    const int count = random_.integer(0, 1) ? random_.integer(0, live.drafts) : live.drafts;
    allocator_.rollback(sequence, count);
    live.drafts -= count;
    live.tokens.resize(live.tokens.size() - static_cast<std::size_t>(count));
    live.ids.resize(live.tokens.size());
  }

  void commit(std::int32_t sequence) {
    allocator_.commit(sequence);
    live_.at(sequence).drafts = 0;
  }

  /// The least recently used entries go first, unless something in use is behind them.
  void evict() {
    const int group = random_.integer(0, num_groups() - 1);
    const auto only_tree = [&](std::int32_t id) {
      return allocator_.users(allocator_.tree().at(id).pages[at(group)], group) == 1;
    };
    std::map<std::int32_t, int> unused;  // identity of the last token, when used
    for (const std::int32_t id : allocator_.tree().ids()) {
      const std::vector<std::int32_t> below = allocator_.tree().subtree(id);
      const std::int32_t last = ids_of(path_tokens(id)).back();
      if (std::ranges::all_of(below, only_tree)) unused[last] = last_used_.at(last);
    }
    const int evictable = allocator_.evictable_pages(group), free = allocator_.free_pages(group);
    const int asked = random_.integer(0, 1) ? random_.integer(0, 3) : random_.integer(0, groups_[at(group)].num_pages);
    REQUIRE(allocator_.evict(asked, group) == std::min(asked, evictable));
    REQUIRE(allocator_.free_pages(group) == free + std::min(asked, evictable));
    std::set<std::int32_t> left;
    for (const std::int32_t id : allocator_.tree().ids()) left.insert(ids_of(path_tokens(id)).back());
    int newest_gone = 0, oldest_left = clock_;
    for (const auto& [last, used] : unused) {
      int& end = left.count(last) ? oldest_left : newest_gone;
      end = left.count(last) ? std::min(end, used) : std::max(end, used);
    }
    REQUIRE(newest_gone <= oldest_left);
    if (asked <= static_cast<int>(unused.size()))
      REQUIRE(static_cast<int>(std::ranges::count_if(unused, [&](const auto& u) { return !left.count(u.first); })) ==
              asked);
    events_[evictions] += std::min(asked, evictable) > 0;
  }

  void save(std::int32_t sequence) {
    if (saved_.size() >= 3) return;
    Saved saved{.live = live_.at(sequence)};
    const auto length = static_cast<std::int64_t>(saved.live.ids.size());
    for (int group = 0; group < num_groups(); ++group)
      for (std::int64_t p = 0; p < length; ++p)
        if (has_page(group, p / o_.page_size, length)) saved.page_rows.push_back(page_cell(sequence, p, group));
    saved.has_sinks = allocator_.sink_slot(sequence) != kNone;
    if (saved.has_sinks)
      for (int row = 0; row < o_.sink_tokens; ++row)
        saved.sink_rows.push_back(cell(CopyKind::sink, allocator_.sink_slot(sequence), row));
    for (int row = 0; row < shape_.ring_rows(); ++row) saved.ring_rows.push_back(cell(CopyKind::ring, sequence, row));
    if (random_.integer(0, 2) == 0) {  // without the ring
      std::ranges::fill(saved.ring_rows, -1);
      saved.live.exact_from = length;
    }
    saved.live.drafts = 0;
    saved.live.least = length;
    saved_.push_back(saved);
    destroy(sequence);
  }

  void restore() {
    if (saved_.empty()) return;
    const Saved saved = saved_.back();
    const auto length = static_cast<std::int64_t>(saved.live.ids.size());
    bool expected = has_slot() && (!saved.has_sinks || can_have_sink());
    for (int group = 0; group < num_groups(); ++group) {
      auto needed = static_cast<std::int64_t>(held_pages(group).size());
      for (std::int64_t i = 0; i < pages_for(length); ++i) needed += has_page(group, i, length);
      expected = expected && needed <= groups_[at(group)].num_pages;
    }
    const auto before = state();
    const std::int32_t made = allocator_.restore(length, saved.live.exact_from, saved.has_sinks);
    REQUIRE((made != kNone) == expected);
    ++events_[expected ? restores : refusals_to_restore];
    if (!expected) return require_state(before);
    saved_.pop_back();
    REQUIRE(live_.emplace(made, saved.live).second);
    if (o_.sink_tokens > 0) REQUIRE((allocator_.sink_slot(made) != kNone) == saved.has_sinks);
    auto row_of_page = saved.page_rows.begin();
    for (int group = 0; group < num_groups(); ++group)
      for (std::int64_t p = 0; p < length; ++p)
        if (has_page(group, p / o_.page_size, length))
          write(CopyKind::page, allocator_.pages(made, group)[static_cast<std::size_t>(p / o_.page_size)],
                p % o_.page_size, *row_of_page++, group);
    for (std::size_t row = 0; row < saved.sink_rows.size(); ++row)
      write(CopyKind::sink, allocator_.sink_slot(made), static_cast<std::int64_t>(row), saved.sink_rows[row]);
    for (std::size_t row = 0; row < saved.ring_rows.size(); ++row)
      write(CopyKind::ring, made, static_cast<std::int64_t>(row), saved.ring_rows[row]);
  }

  std::vector<Growth> random_batch() {
    std::vector<Growth> batch;
    for (const auto& entry : live_)
      if (random_.integer(0, 2)) batch.push_back({entry.first, random_.integer(0, 2 * o_.page_size)});
    for (std::size_t i = batch.size(); i > 1; --i)
      std::swap(batch[i - 1], batch[static_cast<std::size_t>(random_.integer(0, static_cast<int>(i) - 1))]);
    return batch;
  }

  /// Pages of a group that the batch takes, one sequence after the other, when it has released what it may.
  /// @param with_tree  does the tree count as a user?
  int needed_pages(const std::vector<Growth>& batch, bool with_tree, int group) const {
    if (!keeps_pages(groups_[at(group)])) return 0;
    std::map<std::int32_t, int> users;
    for (const auto& entry : tables_after(batch, group))
      for (const std::int32_t page : entry.second) ++users[page];
    if (with_tree)
      for (const std::int32_t id : allocator_.tree().ids()) ++users[allocator_.tree().at(id).pages[at(group)]];
    int needed = 0;
    for (const Growth& g : batch)
      for (std::int64_t p = allocator_.length(g.sequence), end = p + g.tokens; p < end; ++p) {
        if (p % o_.page_size == 0) {
          ++needed;
        } else if (p == allocator_.length(g.sequence)) {
          int& sharing = users.at(allocator_.pages(g.sequence, group).back());
          if (sharing > 1) --sharing, ++needed;
        }
      }
    return needed;
  }

  void grow() {
    const std::vector<Growth> batch = random_batch();
    bool expected = true, easy = true;
    for (int group = 0; group < num_groups(); ++group) {
      const auto others = static_cast<int>(held(tables_after(batch, group)).size());
      expected = expected && needed_pages(batch, false, group) + others <= groups_[at(group)].num_pages;
      easy = easy && needed_pages(batch, true, group) <= allocator_.free_pages(group);
    }
    const auto before = state(), tree_before = tree_state();
    std::vector<std::set<std::int32_t>> held_before, held_after;
    for (int group = 0; group < num_groups(); ++group) {
      held_before.push_back(held_pages(group));
      held_after.push_back(held(tables_after(batch, group)));
    }
    std::map<std::int32_t, std::int32_t> sinks_before;
    bool writes_shared_sinks = false;
    for (const Growth& g : batch) {
      const std::int32_t sink = sinks_before[g.sequence] = allocator_.sink_slot(g.sequence);
      writes_shared_sinks |= g.tokens > 0 && sink != kNone && allocator_.length(g.sequence) < o_.sink_tokens &&
                             allocator_.sink_users(sink) > 1;
    }
    std::vector<CacheCopy> copies;
    REQUIRE(allocator_.grow(batch, copies) == expected);
    if (!expected) {
      ++events_[refusals_to_grow];
      REQUIRE(copies.empty());
      require_state(before);
      return destroy(any());
    }
    for (const Growth& g : batch) live_.at(g.sequence).least = least_after(g);
    for (int group = 0; group < num_groups(); ++group)
      for (const std::int32_t page : held_before[at(group)]) {
        if (held_after[at(group)].count(page)) continue;
        ++events_[pages_released];
        const bool in_tree = allocator_.tree().entry_of(page, at(group)) != PrefixTree::kNone;
        events_[pages_released_to_tree] += in_tree;
        events_[pages_given_out_again_at_once] += !in_tree && allocator_.users(page, group) > 0;
      }
    if (easy && !writes_shared_sinks) REQUIRE(tree_state() == tree_before);
    events_[entries_forgotten_by_grow] += tree_state() != tree_before;
    check_lost_sinks(sinks_before, copies);
    for (const CacheCopy& c : copies) {
      ++events_[c.kind == CopyKind::page ? page_copies : sink_copies];
      events_[page_copies_for_tree] += c.kind == CopyKind::page && viewers(c.kind, c.from, c.group) == 1 &&
                                       allocator_.tree().entry_of(c.from, at(c.group)) != PrefixTree::kNone;
      REQUIRE(viewers(c.kind, c.to, c.group) == 1);
      REQUIRE(viewers(c.kind, c.from, c.group) >= 1);
    }
    copy_all(copies);
    check_step(batch);
    for (const Growth& g : batch) write_tokens(g);
  }

  void check_lost_sinks(const std::map<std::int32_t, std::int32_t>& before, const std::vector<CacheCopy>& copies) {
    std::set<std::int32_t> gone = held_sinks();  // slots that are no longer to be had, or were the source of a copy
    for (const CacheCopy& c : copies)
      if (c.kind == CopyKind::sink) gone.insert(c.from);
    for (const auto& [sequence, sink] : before) {
      if (allocator_.sink_slot(sequence) == sink) continue;
      REQUIRE(allocator_.sink_users(sink) >= 1);  // it was shared
      if (allocator_.sink_slot(sequence) != kNone) continue;
      ++events_[sinks_lost];
      REQUIRE(static_cast<int>(gone.size()) == o_.num_sink_slots);
    }
  }

  void write_tokens(const Growth& g) {
    Live& live = live_.at(g.sequence);
    const auto begin = static_cast<std::int64_t>(live.tokens.size()), end = begin + g.tokens;
    for (std::int64_t p = begin; p < end; ++p) {
      append(live, token());
      const std::int32_t id = live.ids.back(), sink = allocator_.sink_slot(g.sequence);
      for (int group = 0; group < num_groups(); ++group)
        if (keeps_pages(groups_[at(group)]))
          write(CopyKind::page, allocator_.pages(g.sequence, group)[static_cast<std::size_t>(p / o_.page_size)],
                p % o_.page_size, id, group);
      if (p < o_.sink_tokens && sink != kNone) write(CopyKind::sink, sink, p, id);
      if (p >= end - shape_.ring_rows()) write(CopyKind::ring, g.sequence, p % shape_.ring_rows(), id);
    }
    live.drafts = std::min(live.drafts + g.tokens, o_.max_rollback);
  }

  // Checks.

  Tokens path_tokens(std::int32_t id) const {
    Tokens tokens;
    for (; id != PrefixTree::kRoot; id = allocator_.tree().at(id).parent) {
      const Tokens& page = allocator_.tree().at(id).tokens;
      tokens.insert(tokens.begin(), page.begin(), page.end());
    }
    return tokens;
  }

  /// What the step's queries see of the tokens before it is there, whatever pages were released.
  void check_step(const std::vector<Growth>& batch) {
    for (const Growth& g : batch) {
      const Tokens& ids = live_.at(g.sequence).ids;
      const auto length = static_cast<std::int64_t>(ids.size());
      for (int group = 0; group < num_groups(); ++group)
        for (std::int64_t p = first_seen(group, length); keeps_pages(groups_[at(group)]) && p < length; ++p)
          if (page_cell(g.sequence, p, group) != ids[static_cast<std::size_t>(p)])
            FAIL("sequence " << g.sequence << ", group " << group << ", position " << p);
    }
  }

  void check_pages(std::int32_t sequence, const Live& live, int group) {
    CAPTURE(group);
    const auto length = static_cast<std::int64_t>(live.ids.size());
    const auto pages = allocator_.pages(sequence, group);
    REQUIRE(static_cast<std::int64_t>(pages.size()) == pages_for(length));
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < pages_for(length); ++i) {
      const bool has = pages[static_cast<std::size_t>(i)] != kNone;
      if (has != has_page(group, i, live.least)) FAIL("page " << i << " of " << length << " tokens: " << has);
      count += has;
    }
    for (std::int64_t p = 0; p < length; ++p) {
      if (!has_page(group, p / o_.page_size, live.least)) {
        // No query sees it, not even if all is taken back.
        if (keeps_pages(groups_[at(group)])) REQUIRE(p < first_seen(group, length - live.drafts));
      } else if (page_cell(sequence, p, group) != live.ids[static_cast<std::size_t>(p)]) {
        FAIL("position " << p);
      }
    }
  }

  void check_sequences() {
    for (const auto& [sequence, live] : live_) {
      CAPTURE(sequence);
      const auto length = static_cast<std::int64_t>(live.ids.size());
      REQUIRE(allocator_.length(sequence) == length);
      REQUIRE(allocator_.uncommitted(sequence) == live.drafts);
      REQUIRE(allocator_.exact_from(sequence) == live.exact_from);
      for (int group = 0; group < num_groups(); ++group) check_pages(sequence, live, group);
      const std::int32_t sink = allocator_.sink_slot(sequence);
      Tokens exact, expected_exact;
      for (std::int64_t p = 0; p < length; ++p) {
        const std::int32_t id = live.ids[static_cast<std::size_t>(p)];
        if (p < o_.sink_tokens && sink != kNone) {
          exact.push_back(cell(CopyKind::sink, sink, p));
          expected_exact.push_back(id);
        }
        if (p >= std::max(length - shape_.recent_tokens, allocator_.exact_from(sequence))) {
          exact.push_back(cell(CopyKind::ring, sequence, p % shape_.ring_rows()));
          expected_exact.push_back(id);
        }
      }
      REQUIRE(exact == expected_exact);
    }
  }

  void check_tree() {
    const PrefixTree& tree = allocator_.tree();
    REQUIRE(static_cast<int>(tree.ids().size()) == tree.size());
    for (const std::int32_t id : tree.ids()) {
      const PrefixEntry& entry = tree.at(id);
      const Tokens tokens = path_tokens(id), ids = ids_of(tokens);
      REQUIRE(static_cast<int>(tokens.size()) == entry.depth * o_.page_size);
      REQUIRE(tree.find(tokens).back() == id);
      for (int group = 0; group < num_groups(); ++group) {
        const std::int32_t page = entry.pages[at(group)];
        REQUIRE(tree.entry_of(page, at(group)) == id);
        for (int row = 0; row < o_.page_size; ++row) {
          const auto position = tokens.size() - static_cast<std::size_t>(o_.page_size - row);
          if (cell(CopyKind::page, page, row, group) != ids[position]) FAIL("entry " << id << ", row " << row);
        }
      }
      if (entry.sink == kNone) continue;
      REQUIRE(entry.depth == (o_.sink_tokens + o_.page_size - 1) / o_.page_size);
      for (int row = 0; row < o_.sink_tokens; ++row)
        if (cell(CopyKind::sink, entry.sink, row) != ids[static_cast<std::size_t>(row)])
          FAIL("entry " << id << ", sink " << row);
    }
  }

  void check_references() {
    int free_sinks = 0;
    for (int group = 0; group < num_groups(); ++group) {
      int free = 0, evictable = 0;
      for (std::int32_t page = 0; page < groups_[at(group)].num_pages; ++page) {
        const int users = viewers(CopyKind::page, page, group), found = allocator_.users(page, group);
        if (found != users) FAIL("page " << page << ": " << found << " for " << users);
        free += users == 0;
        evictable += users == 1 && allocator_.tree().entry_of(page, at(group)) != PrefixTree::kNone;
      }
      REQUIRE(allocator_.free_pages(group) == free);
      REQUIRE(allocator_.evictable_pages(group) == evictable);
    }
    for (std::int32_t slot = 0; o_.sink_tokens > 0 && slot < o_.num_sink_slots; ++slot) {
      const int users = viewers(CopyKind::sink, slot);
      if (allocator_.sink_users(slot) != users) FAIL("sink slot " << slot << ": expected " << users);
      free_sinks += users == 0;
    }
    REQUIRE(allocator_.free_sink_slots() == free_sinks);
  }

  test::Random random_;
  std::array<int, kEvents>& events_;
  Shape shape_;
  CacheAllocatorOptions o_;
  std::vector<PageGroup> groups_;
  CacheAllocator allocator_;
  Identities identities_;
  std::vector<Tokens> pages_;  ///< [group][page * rows + row]
  Tokens sinks_, rings_;       ///< [slot * rows + row]
  std::map<std::int32_t, Live> live_;
  std::vector<Saved> saved_;
  std::vector<Tokens> seen_;
  std::map<std::int32_t, int> last_used_;  ///< by identity
  int clock_ = 0;
};

}  // namespace

TEST_CASE("Sequences and the prefix tree keep their rows through any schedule of calls", "[runtime][property]") {
  std::array<int, kEvents> events = {};
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    CAPTURE(seed);
    test::Random random(seed);
    Model model(random_shape(random), seed, events);
    for (int step = 0; step < 250; ++step) {
      CAPTURE(step);
      model.step();
    }
  }
  // The schedules get everywhere.
  for (std::size_t event = 0; event < kEvents; ++event) {
    CAPTURE(event, events[event]);
    CHECK(events[event] >= 10);
  }
}
