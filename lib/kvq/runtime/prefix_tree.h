#pragma once

#include <kvq/runtime/reference_pool.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// One full page of known tokens, in every group of layers, which stands behind the pages of its parents.
struct PrefixEntry {
  std::int32_t parent = -1;  ///< id of the entry of the page before; PrefixTree::kRoot for a first page
  std::int32_t depth = 0;    ///< pages from the root to here: the first page has depth 1
  std::int32_t sink = -1;    ///< sink slot of the sequence's beginning, at the page of its last sink; else -1
  std::int64_t last_used = 0;
  std::vector<std::int32_t> pages = {};     ///< [groups]; empty: the id is free, or the root's
  std::vector<std::int32_t> tokens = {};    ///< [page_size]
  std::vector<std::int32_t> children = {};  ///< ids, ordered by their tokens
};

/// Which pages hold which tokens (a radix cache): one entry for each page of tokens, with that page of each group. A
/// page is in the tree at most once. Counts no references; CacheAllocator does, and keeps the preconditions.
class PrefixTree {
 public:
  /// @param num_pages  [groups] of each group's pool
  PrefixTree(std::span<const std::int32_t> num_pages, std::int32_t page_size);

  static constexpr std::int32_t kNone = -1, kRoot = 0;

  std::int32_t size() const { return size_; }
  const PrefixEntry& at(std::int32_t id) const { return entries_[static_cast<std::size_t>(id)]; }
  std::vector<std::int32_t> ids() const;  ///< of all entries, in no order that means anything

  /// Entries of the longest prefix of whole pages, from the first page on.
  std::vector<std::int32_t> find(std::span<const std::int32_t> tokens) const;
  /// The entry that has the page of a group, or kNone.
  std::int32_t entry_of(std::int32_t page, std::size_t group = 0) const {
    return entry_of_[group][static_cast<std::size_t>(page)];
  }
  /// The entry and all below it, parents first.
  std::vector<std::int32_t> subtree(std::int32_t id) const;
  std::vector<std::int32_t> holders_of_sink(std::int32_t slot) const;

  /// A new entry. @param tokens  [page_size], of no other child of `parent`  @param pages  [groups]
  std::int32_t add(std::int32_t parent, std::span<const std::int32_t> tokens, std::vector<std::int32_t> pages);
  void set_sink(std::int32_t id, std::int32_t slot) { entries_[static_cast<std::size_t>(id)].sink = slot; }
  /// Marks entries as used just now. @param path  from a first page on, so that no child is used later than its parent
  void touch(std::span<const std::int32_t> path);
  /// Removes an entry without children.
  void remove(std::int32_t id);

  /// Pages of a group that have no user but the tree. @param pages  the group's
  std::int32_t unused_pages(const ReferencePool& pages, std::size_t group) const;
  /// The entries of a group's unused pages. Whoever removes them in this order, each with its subtree, frees one page
  /// of the group for each: first those below which no page is in use, the least recently used first, children before
  /// parents.
  std::vector<std::int32_t> eviction_order(const ReferencePool& pages, std::size_t group) const;
  /// The least recently used of the sink slots that have no user but the tree, or kNone.
  std::int32_t unused_sink(const ReferencePool& sinks) const;

 private:
  std::vector<std::int32_t>::const_iterator lower_bound(std::int32_t parent,
                                                        std::span<const std::int32_t> tokens) const;
  std::int32_t child(std::int32_t parent, std::span<const std::int32_t> tokens) const;  ///< id or kNone

  std::size_t page_size_;
  std::int32_t size_ = 0;
  std::int64_t clock_ = 0;
  std::vector<PrefixEntry> entries_;                 ///< by id
  std::vector<std::int32_t> free_ids_;               ///< stack
  std::vector<std::vector<std::int32_t>> entry_of_;  ///< by group and page
};

}  // namespace kvq
