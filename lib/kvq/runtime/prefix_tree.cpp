#include <kvq/runtime/prefix_tree.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace kvq {

namespace {

bool comes_before(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  return std::ranges::lexicographical_compare(a, b);
}

}  // namespace

PrefixTree::PrefixTree(std::span<const std::int32_t> num_pages, std::int32_t page_size)
    : page_size_(static_cast<std::size_t>(page_size)), entries_(1) {  // the root
  for (const std::int32_t count : num_pages) entry_of_.emplace_back(static_cast<std::size_t>(count), kNone);
}

std::vector<std::int32_t> PrefixTree::ids() const {
  std::vector<std::int32_t> all;
  for (std::int32_t id = 1; id < static_cast<std::int32_t>(entries_.size()); ++id)
    if (!at(id).pages.empty()) all.push_back(id);
  return all;
}

std::vector<std::int32_t>::const_iterator PrefixTree::lower_bound(std::int32_t parent,
                                                                  std::span<const std::int32_t> tokens) const {
  return std::ranges::lower_bound(at(parent).children, tokens, comes_before,
                                  [&](std::int32_t id) { return std::span(at(id).tokens); });
}

std::int32_t PrefixTree::child(std::int32_t parent, std::span<const std::int32_t> tokens) const {
  const auto found = lower_bound(parent, tokens);
  if (found == at(parent).children.end() || !std::ranges::equal(at(*found).tokens, tokens)) return kNone;
  return *found;
}

std::vector<std::int32_t> PrefixTree::find(std::span<const std::int32_t> tokens) const {
  std::vector<std::int32_t> path;
  for (std::int32_t id = kRoot; tokens.size() >= page_size_; tokens = tokens.subspan(page_size_)) {
    id = child(id, tokens.first(page_size_));
    if (id == kNone) break;
    path.push_back(id);
  }
  return path;
}

std::vector<std::int32_t> PrefixTree::subtree(std::int32_t id) const {
  std::vector<std::int32_t> all = {id};
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::vector<std::int32_t>& children = at(all[i]).children;
    all.insert(all.end(), children.begin(), children.end());
  }
  return all;
}

std::vector<std::int32_t> PrefixTree::holders_of_sink(std::int32_t slot) const {
  std::vector<std::int32_t> holders = ids();
  std::erase_if(holders, [&](std::int32_t id) { return at(id).sink != slot; });
  return holders;
}

std::int32_t PrefixTree::add(std::int32_t parent, std::span<const std::int32_t> tokens,
                             std::vector<std::int32_t> pages) {
  if (free_ids_.empty()) {
    free_ids_.push_back(static_cast<std::int32_t>(entries_.size()));
    entries_.emplace_back();
  }
  const std::int32_t id = free_ids_.back();
  free_ids_.pop_back();
  const auto place = lower_bound(parent, tokens);
  entries_[static_cast<std::size_t>(parent)].children.insert(place, id);
  for (std::size_t group = 0; group < pages.size(); ++group)
    entry_of_[group][static_cast<std::size_t>(pages[group])] = id;
  entries_[static_cast<std::size_t>(id)] = {.parent = parent,
                                            .depth = at(parent).depth + 1,
                                            .pages = std::move(pages),
                                            .tokens = std::vector<std::int32_t>(tokens.begin(), tokens.end())};
  ++size_;
  return id;
}

void PrefixTree::touch(std::span<const std::int32_t> path) {
  ++clock_;
  for (const std::int32_t id : path) entries_[static_cast<std::size_t>(id)].last_used = clock_;
}

void PrefixTree::remove(std::int32_t id) {
  const PrefixEntry& entry = at(id);
  entries_[static_cast<std::size_t>(entry.parent)].children.erase(lower_bound(entry.parent, entry.tokens));
  for (std::size_t group = 0; group < entry.pages.size(); ++group)
    entry_of_[group][static_cast<std::size_t>(entry.pages[group])] = kNone;
  entries_[static_cast<std::size_t>(id)] = {};
  free_ids_.push_back(id);
  --size_;
}

std::int32_t PrefixTree::unused_pages(const ReferencePool& pages, std::size_t group) const {
  const std::vector<std::int32_t> all = ids();
  return static_cast<std::int32_t>(
      std::ranges::count_if(all, [&](std::int32_t id) { return pages.users(at(id).pages[group]) == 1; }));
}

std::vector<std::int32_t> PrefixTree::eviction_order(const ReferencePool& pages, std::size_t group) const {
  std::vector<std::int32_t> order = ids();
  std::vector<char> used(entries_.size());  // is this page in use, or one below it?
  for (const std::int32_t id : order)
    if (pages.users(at(id).pages[group]) > 1)
      for (std::int32_t i = id; i != kRoot && !used[static_cast<std::size_t>(i)]; i = at(i).parent)
        used[static_cast<std::size_t>(i)] = 1;
  std::erase_if(order, [&](std::int32_t id) { return pages.users(at(id).pages[group]) > 1; });
  // A child is never used later than its parent, nor is it `used` where the parent is not. So of two unused pages above
  // each other the lower one comes first.
  std::ranges::sort(order, {}, [&](std::int32_t id) {
    return std::tuple(used[static_cast<std::size_t>(id)], at(id).last_used, -at(id).depth, id);
  });
  return order;
}

std::int32_t PrefixTree::unused_sink(const ReferencePool& sinks) const {
  struct Holders {
    std::int32_t count = 0;
    std::int64_t last_used = 0;
  };
  std::map<std::int32_t, Holders> by_slot;
  for (const std::int32_t id : ids()) {
    if (at(id).sink == -1) continue;
    Holders& holders = by_slot[at(id).sink];
    ++holders.count;
    holders.last_used = std::max(holders.last_used, at(id).last_used);
  }
  std::erase_if(by_slot, [&](const auto& slot) { return sinks.users(slot.first) > slot.second.count; });
  const auto oldest = std::ranges::min_element(by_slot, {}, [](const auto& slot) { return slot.second.last_used; });
  return oldest == by_slot.end() ? kNone : oldest->first;
}

}  // namespace kvq
