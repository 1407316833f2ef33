#include <kvq/core/error.h>
#include <kvq/runtime/cache_allocator.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace kvq {

namespace {

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();

[[noreturn]] void refuse(const std::string& what) { throw Error{ErrorKind::usage, "cache allocator: " + what}; }

const CacheAllocatorOptions& checked(const CacheAllocatorOptions& o) {
  if (o.num_pages < 0 || o.page_size < 1 || o.num_sequences < 0 || o.num_sink_slots < 0 || o.sink_tokens < 0 ||
      o.max_rollback < 0)
    refuse(fmt::format("{} pages of {} tokens, {} sequences, {} sink slots of {} tokens, {} tokens taken back at once",
                       o.num_pages, o.page_size, o.num_sequences, o.num_sink_slots, o.sink_tokens, o.max_rollback));
  if (!o.groups.empty() && o.num_pages != 0) refuse(fmt::format("{} pages beside those of groups", o.num_pages));
  for (const PageGroup& group : o.groups)
    if (group.num_pages < 0 || group.sliding_window < 0)
      refuse(fmt::format("a group of {} pages and a sliding window of {}", group.num_pages, group.sliding_window));
  return o;
}

std::vector<std::int32_t> pool_sizes(const std::vector<PageGroup>& groups) {
  std::vector<std::int32_t> sizes;
  for (const PageGroup& group : groups) sizes.push_back(group.num_pages);
  return sizes;
}

}  // namespace

CacheAllocator::CacheAllocator(const CacheAllocatorOptions& options)
    : options_(checked(options)),
      groups_(options.groups.empty() ? std::vector<PageGroup>{{.num_pages = options.num_pages}} : options.groups),
      sinks_(options.sink_tokens > 0 ? options.num_sink_slots : 0),
      sequences_(static_cast<std::size_t>(options.num_sequences)),
      tree_(pool_sizes(groups_), options.page_size) {
  for (const PageGroup& group : groups_) pages_.emplace_back(group.num_pages);
}

const CacheAllocator::Sequence& CacheAllocator::at(std::int32_t sequence) const {
  if (sequence < 0 || sequence >= options_.num_sequences || !sequences_[static_cast<std::size_t>(sequence)].used)
    refuse(fmt::format("there is no sequence {}", sequence));
  return sequences_[static_cast<std::size_t>(sequence)];
}

CacheAllocator::Sequence& CacheAllocator::at(std::int32_t sequence) {
  return const_cast<Sequence&>(static_cast<const CacheAllocator*>(this)->at(sequence));
}

std::size_t CacheAllocator::index_of(std::int32_t group) const {
  if (group < 0 || group >= groups()) refuse(fmt::format("there is no group {}", group));
  return static_cast<std::size_t>(group);
}

std::int32_t CacheAllocator::users(std::int32_t page, std::int32_t group) const {
  const ReferencePool& pages = pages_[index_of(group)];
  if (page < 0 || page >= pages.size()) refuse(fmt::format("there is no page {}", page));
  return pages.users(page);
}

std::int32_t CacheAllocator::evictable_pages(std::int32_t group) const {
  const std::size_t index = index_of(group);
  return tree_.unused_pages(pages_[index], index);
}

std::int32_t CacheAllocator::sink_users(std::int32_t slot) const {
  if (slot < 0 || slot >= sinks_.size()) refuse(fmt::format("there is no sink slot {}", slot));
  return sinks_.users(slot);
}

std::int32_t CacheAllocator::free_sequence() const {
  const auto free = std::ranges::find(sequences_, false, &Sequence::used);
  return free == sequences_.end() ? kNone : static_cast<std::int32_t>(free - sequences_.begin());
}

// Groups.

bool CacheAllocator::keeps_pages(std::size_t group) const {
  return groups_[group].num_pages > 0 || groups_[group].sliding_window == 0;
}

std::int64_t CacheAllocator::first_page(std::int64_t length, std::int32_t group) const {
  const std::size_t index = index_of(group);
  const std::int64_t window = groups_[index].sliding_window;
  if (!keeps_pages(index)) return pages_for(length);
  return window > 0 && length > window ? (length - window) / page_size() : 0;
}

std::int64_t CacheAllocator::first_page(const Sequence& sequence, std::int32_t tokens, std::size_t group) const {
  // Its first query is behind `length`, or the last of its tokens once more. After a rollback it is not before
  // `committed`, which moves with the growth.
  const std::int64_t after = std::max(sequence.committed, sequence.length + tokens - options_.max_rollback);
  return first_page(std::min(sequence.length, after), static_cast<std::int32_t>(group));
}

void CacheAllocator::share(std::int32_t page, std::size_t group) {
  if (page != kNone) pages_[group].share(page);
}

void CacheAllocator::release(std::int32_t page, std::size_t group) {
  if (page != kNone) pages_[group].release(page);
}

// Sequences: beginning and end.

CacheAllocator::Sequence CacheAllocator::empty_sequence() const {
  return {.used = true, .pages = std::vector<std::vector<std::int32_t>>(groups_.size())};
}

std::int32_t CacheAllocator::create() {
  const std::int32_t made = free_sequence();
  if (made == kNone) return kNone;
  Sequence& s = sequences_[static_cast<std::size_t>(made)] = empty_sequence();
  s.sink = take_sink();
  return made;
}

CacheAllocator::Start CacheAllocator::create(std::span<const std::int32_t> tokens) {
  const std::vector<std::int32_t> path = match(tokens);
  if (path.empty()) return {.sequence = create()};
  const std::int32_t made = free_sequence();
  if (made == kNone) return {};
  const std::int64_t hit = static_cast<std::int64_t>(path.size()) * page_size();
  Sequence& s = sequences_[static_cast<std::size_t>(made)];
  s = empty_sequence();
  s.length = s.committed = s.exact_from = hit;
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    s.pages[group].resize(path.size(), kNone);
    for (auto i = static_cast<std::size_t>(first_page(hit, static_cast<std::int32_t>(group))); i < path.size(); ++i)
      share(s.pages[group][i] = tree_.at(path[i]).pages[group], group);
  }
  for (const std::int32_t id : path)
    if (tree_.at(id).sink != kNone) s.sink = tree_.at(id).sink;
  if (s.sink != kNone) sinks_.share(s.sink);
  tree_.touch(path);
  return {.sequence = made, .hit_tokens = hit};
}

std::int32_t CacheAllocator::restore(std::int64_t length, std::int64_t exact_from, bool with_sinks) {
  if (exact_from < 0 || exact_from > length || length > kMaxLength)
    refuse(fmt::format("a sequence of {} tokens with exact rows from {} on", length, exact_from));
  const bool sinks = with_sinks && options_.sink_tokens > 0;
  const std::int32_t made = free_sequence();
  if (made == kNone) return kNone;
  std::vector<std::int64_t> needed;
  for (std::int32_t group = 0; group < groups(); ++group) {
    needed.push_back(pages_for(length) - first_page(length, group));
    if (!has_room(needed.back(), index_of(group))) return kNone;
  }
  if (sinks && sinks_.free() == 0 && tree_.unused_sink(sinks_) == kNone) return kNone;
  Sequence& s = sequences_[static_cast<std::size_t>(made)];
  s = empty_sequence();
  s.length = s.committed = length, s.exact_from = exact_from;
  if (sinks) s.sink = take_sink();
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    free_pages_for(needed[group], group);
    s.pages[group].resize(static_cast<std::size_t>(pages_for(length) - needed[group]), kNone);
  }
  append_pages(s);
  return made;
}

CacheAllocator::Fork CacheAllocator::fork(std::int32_t sequence) {
  Sequence& from = at(sequence);
  const std::int32_t made = free_sequence();
  if (made == kNone) return {};
  from.committed = from.length;
  Sequence& to = sequences_[static_cast<std::size_t>(made)];
  to = from;
  for (std::size_t group = 0; group < groups_.size(); ++group)
    for (const std::int32_t page : to.pages[group]) share(page, group);
  Fork result{.sequence = made, .copies = {{CopyKind::ring, sequence, made}}};
  if (from.sink == kNone) return result;
  if (from.length >= options_.sink_tokens) {  // committed, so neither writes sinks again
    sinks_.share(to.sink);
  } else {
    to.sink = take_sink();
    if (to.sink != kNone) result.copies.push_back({CopyKind::sink, from.sink, to.sink});
  }
  return result;
}

void CacheAllocator::destroy(std::int32_t sequence) {
  Sequence& s = at(sequence);
  for (std::size_t group = 0; group < groups_.size(); ++group)
    for (const std::int32_t page : s.pages[group]) release(page, group);
  if (s.sink != kNone) sinks_.release(s.sink);
  s = {};
}

// Sequences: growing and shrinking.

std::int32_t CacheAllocator::page_to_append(const Sequence& sequence, std::int32_t tokens, std::size_t group) const {
  return tokens > 0 && sequence.length % page_size() != 0 ? sequence.pages[group].back() : kNone;
}

bool CacheAllocator::writes_shared_sinks(const Sequence& sequence, std::int32_t tokens) const {
  return tokens > 0 && sequence.length < options_.sink_tokens && sequence.sink != kNone &&
         sinks_.users(sequence.sink) > 1;
}

void CacheAllocator::check(std::span<const Growth> batch) const {
  std::set<std::int32_t> seen;
  for (const Growth& g : batch) {
    const std::int64_t length = at(g.sequence).length;
    if (g.tokens < 0 || length > kMaxLength - g.tokens)
      refuse(fmt::format("sequence {} of {} tokens and {} more", g.sequence, length, g.tokens));
    if (!seen.insert(g.sequence).second) refuse(fmt::format("sequence {} is twice in a batch", g.sequence));
  }
}

bool CacheAllocator::has_room(std::int64_t pages, std::size_t group) const {
  const std::int64_t free = pages_[group].free();
  return pages <= free || pages <= free + tree_.unused_pages(pages_[group], group);
}

bool CacheAllocator::has_room(std::span<const Growth> batch, bool with_tree) const {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    const Users released = releases(batch, group);
    std::int64_t needed = needed_pages(batch, with_tree, group, released);
    for (const auto& [page, count] : released)  // what only the tree holds then is as good as free
      needed -= pages_[group].users(page) - count == (tree_.entry_of(page, group) != PrefixTree::kNone ? 1 : 0);
    if (!has_room(needed, group)) return false;
  }
  return true;
}

CacheAllocator::Users CacheAllocator::releases(std::span<const Growth> batch, std::size_t group) const {
  Users released;
  for (const Growth& g : batch) {
    const std::vector<std::int32_t>& pages = at(g.sequence).pages[group];
    for (std::int64_t i = first_page(at(g.sequence), g.tokens, group) - 1;
         i >= 0 && pages[static_cast<std::size_t>(i)] != kNone; --i)  // those before were released before
      ++released[pages[static_cast<std::size_t>(i)]];
  }
  return released;
}

std::int64_t CacheAllocator::needed_pages(std::span<const Growth> batch, bool with_tree, std::size_t group,
                                          const Users& released) const {
  if (!keeps_pages(group)) return 0;
  std::int64_t needed = 0;
  Users left;  // users of each page to append to that have not yet moved to a copy
  for (const Growth& g : batch) {
    const Sequence& s = at(g.sequence);
    needed += pages_for(s.length + g.tokens) - pages_for(s.length);
    const std::int32_t page = page_to_append(s, g.tokens, group);
    if (page == kNone) continue;
    const bool in_tree = tree_.entry_of(page, group) != PrefixTree::kNone;
    const auto gone = released.find(page);
    const std::int32_t others = (in_tree && !with_tree) + (gone == released.end() ? 0 : gone->second);
    std::int32_t& users = left.try_emplace(page, pages_[group].users(page) - others).first->second;
    if (users > 1) --users, ++needed;
  }
  return needed;
}

// A page that a sequence has below its length and still appends to can be full and in the tree, if the sequence has
// taken tokens back after insert(). rollback() releases the pages behind it, so it is the last page in any case. It is
// copied; but if there is no page for the copy, then the tree forgets it.
bool CacheAllocator::make_page_room(std::span<const Growth> batch) {
  if (!has_room(batch, true)) {
    if (!has_room(batch, false)) return false;
    for (const Growth& g : batch)
      for (std::size_t group = 0; group < groups_.size(); ++group) {
        const std::int32_t page = page_to_append(at(g.sequence), g.tokens, group);
        if (page != kNone && tree_.entry_of(page, group) != PrefixTree::kNone) forget(tree_.entry_of(page, group));
      }
  }
  release_behind_windows(batch);
  for (std::size_t group = 0; group < groups_.size(); ++group)
    free_pages_for(needed_pages(batch, true, group, {}), group);
  return true;
}

void CacheAllocator::release_behind_windows(std::span<const Growth> batch) {
  for (const Growth& g : batch)
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      std::vector<std::int32_t>& pages = at(g.sequence).pages[group];
      for (std::int64_t i = first_page(at(g.sequence), g.tokens, group) - 1;
           i >= 0 && pages[static_cast<std::size_t>(i)] != kNone; --i)
        release(std::exchange(pages[static_cast<std::size_t>(i)], kNone), group);
    }
}

void CacheAllocator::free_pages_for(std::int64_t pages, std::size_t group) {
  const std::int64_t missing = pages - pages_[group].free();
  if (missing > 0) evict(static_cast<std::int32_t>(missing), static_cast<std::int32_t>(group));
}

// The tree gives up what the moves need before the first of them. Otherwise a slot or page that one sequence has left
// to the tree could become free, and the target of another's copy while it is still the source of the first.
void CacheAllocator::make_sink_room(std::span<const Growth> batch) {
  std::int32_t needed = 0;
  for (const Growth& g : batch) {
    const Sequence& s = at(g.sequence);
    if (!writes_shared_sinks(s, g.tokens)) continue;
    const auto in_tree = static_cast<std::int32_t>(tree_.holders_of_sink(s.sink).size());
    if (needed < sinks_.free()) {
      ++needed;
    } else if (sinks_.users(s.sink) == in_tree + 1) {
      forget_sink(s.sink);  // no copy, and no other sequence loses by it
    } else if (free_a_sink()) {
      ++needed;
    }
  }
}

bool CacheAllocator::grow(std::span<const Growth> batch, std::vector<CacheCopy>& copies) {
  check(batch);
  if (!make_page_room(batch)) return false;
  make_sink_room(batch);
  for (const Growth& g : batch) {
    Sequence& s = at(g.sequence);
    for (std::size_t group = 0; group < groups_.size(); ++group) {
      const std::int32_t page = page_to_append(s, g.tokens, group);
      if (page != kNone && pages_[group].users(page) > 1) move_page(s, group, copies);
    }
    if (writes_shared_sinks(s, g.tokens)) move_sinks(s, copies);
    s.length += g.tokens;
    append_pages(s);
    s.committed = std::max(s.committed, s.length - options_.max_rollback);
  }
  return true;
}

void CacheAllocator::move_page(Sequence& sequence, std::size_t group, std::vector<CacheCopy>& copies) {
  const std::int32_t from = sequence.pages[group].back(), to = pages_[group].take();
  pages_[group].release(from);
  sequence.pages[group].back() = to;
  copies.push_back({CopyKind::page, from, to, static_cast<std::int32_t>(group)});
}

void CacheAllocator::move_sinks(Sequence& sequence, std::vector<CacheCopy>& copies) {
  const std::int32_t from = sequence.sink, to = sinks_.free() > 0 ? sinks_.take() : kNone;
  sinks_.release(from);
  sequence.sink = to;
  if (to != kNone) copies.push_back({CopyKind::sink, from, to});
}

void CacheAllocator::append_pages(Sequence& sequence) {
  const auto count = static_cast<std::size_t>(pages_for(sequence.length));
  for (std::size_t group = 0; group < groups_.size(); ++group)
    while (sequence.pages[group].size() < count)
      sequence.pages[group].push_back(keeps_pages(group) ? pages_[group].take() : kNone);
}

void CacheAllocator::commit(std::int32_t sequence) { at(sequence).committed = at(sequence).length; }

void CacheAllocator::rollback(std::int32_t sequence, std::int32_t tokens) {
  Sequence& s = at(sequence);
  if (tokens < 0 || tokens > s.length - s.committed)
    refuse(fmt::format("sequence {}: expected to take back at most {} tokens, found {}", sequence,
                       s.length - s.committed, tokens));
  s.length -= tokens;
  const auto count = static_cast<std::size_t>(pages_for(s.length));
  for (std::size_t group = 0; group < groups_.size(); ++group)
    for (std::vector<std::int32_t>& pages = s.pages[group]; pages.size() > count; pages.pop_back())
      release(pages.back(), group);
}

// The tree.

std::vector<std::int32_t> CacheAllocator::match(std::span<const std::int32_t> tokens) const {
  std::vector<std::int32_t> path = tree_.find(tokens.first(tokens.empty() ? 0 : tokens.size() - 1));
  if (static_cast<std::int64_t>(path.size()) * page_size() < options_.sink_tokens) path.clear();
  return path;
}

std::int64_t CacheAllocator::lookup(std::span<const std::int32_t> tokens) const {
  return static_cast<std::int64_t>(match(tokens).size()) * page_size();
}

void CacheAllocator::check_insert(std::int32_t sequence, std::size_t full, std::span<const std::int32_t> path) const {
  for (std::size_t group = 0; group < groups_.size(); ++group)
    for (std::size_t i = 0; i < full; ++i) {
      const std::int32_t page = at(sequence).pages[group][i];
      const std::int32_t entry = page == kNone ? PrefixTree::kNone : tree_.entry_of(page, group);
      if (entry != PrefixTree::kNone && (i >= path.size() || path[i] != entry))
        refuse(fmt::format("page {} of sequence {} is in the prefix tree with other tokens", page, sequence));
    }
}

void CacheAllocator::insert(std::int32_t sequence, std::span<const std::int32_t> tokens) {
  const Sequence& s = at(sequence);
  const auto page_tokens = static_cast<std::size_t>(page_size());
  const std::size_t full = std::min(static_cast<std::size_t>(s.length), tokens.size()) / page_tokens;
  std::vector<std::int32_t> path = tree_.find(tokens.first(full * page_tokens));
  check_insert(sequence, full, path);
  for (std::size_t i = path.size(); i < full; ++i) {
    std::vector<std::int32_t> pages;
    for (const std::vector<std::int32_t>& of_group : s.pages) pages.push_back(of_group[i]);
    if (std::ranges::count(pages, kNone) > 0) break;
    for (std::size_t group = 0; group < groups_.size(); ++group) share(pages[group], group);
    const std::int32_t parent = path.empty() ? PrefixTree::kRoot : path.back();
    path.push_back(tree_.add(parent, tokens.subspan(i * page_tokens, page_tokens), std::move(pages)));
  }
  tree_.touch(path);
  const std::int64_t last_sink_page = (options_.sink_tokens - std::int64_t{1}) / page_size();
  if (s.sink == kNone || last_sink_page >= static_cast<std::int64_t>(path.size())) return;
  const std::int32_t holder = path[static_cast<std::size_t>(last_sink_page)];
  if (tree_.at(holder).sink != kNone) return;
  tree_.set_sink(holder, s.sink);
  sinks_.share(s.sink);
}

std::int32_t CacheAllocator::evict(std::int32_t pages, std::int32_t group) {
  const std::size_t index = index_of(group);
  if (pages < 0) refuse(fmt::format("evict {} pages", pages));
  if (pages == 0) return 0;
  const std::vector<std::int32_t> order = tree_.eviction_order(pages_[index], index);
  const std::size_t count = std::min(order.size(), static_cast<std::size_t>(pages));
  for (const std::int32_t id : std::span(order).first(count)) forget(id);
  return static_cast<std::int32_t>(count);
}

void CacheAllocator::forget(std::int32_t entry) {
  const std::vector<std::int32_t> ids = tree_.subtree(entry);
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    for (std::size_t group = 0; group < groups_.size(); ++group) release(tree_.at(*id).pages[group], group);
    if (tree_.at(*id).sink != kNone) sinks_.release(tree_.at(*id).sink);
    tree_.remove(*id);
  }
}

void CacheAllocator::forget_sink(std::int32_t slot) {
  for (const std::int32_t id : tree_.holders_of_sink(slot)) forget(id);
}

bool CacheAllocator::free_a_sink() {
  const std::int32_t slot = tree_.unused_sink(sinks_);
  if (slot != kNone) forget_sink(slot);
  return slot != kNone;
}

std::int32_t CacheAllocator::take_sink() { return sinks_.free() > 0 || free_a_sink() ? sinks_.take() : kNone; }

}  // namespace kvq
