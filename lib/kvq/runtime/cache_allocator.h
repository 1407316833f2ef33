#pragma once

#include <kvq/runtime/prefix_tree.h>
#include <kvq/runtime/reference_pool.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace kvq {

/// Layers with page tables and a pool of pages of their own.
struct PageGroup {
  std::int32_t num_pages = 0;       ///< 0 with a sliding window: the group keeps no pages
  std::int32_t sliding_window = 0;  ///< tokens that a query sees, itself included; 0: all
};

/// Most pages in which `tokens` consecutive tokens lie, wherever they begin.
constexpr std::int64_t page_run(std::int64_t tokens, std::int64_t page_size) {
  return tokens > 0 ? (tokens + 2 * page_size - 2) / page_size : 0;
}

struct CacheAllocatorOptions {
  std::int32_t num_pages = 0;          ///< without groups; a page number stands for that page of every layer
  std::int32_t page_size = 0;          ///< tokens
  std::int32_t num_sequences = 0;      ///< that exist at once; each has a ring slot
  std::int32_t num_sink_slots = 0;     ///< without use if sink_tokens is 0
  std::int32_t sink_tokens = 0;        ///< first tokens of a sequence of which a sink slot holds exact rows
  std::int32_t max_rollback = 0;       ///< most tokens that are taken back at once
  std::vector<PageGroup> groups = {};  ///< a page number stands for that page of every layer of its group; empty: one
                                       ///< group of num_pages, which sees all tokens
};

enum class CopyKind { page, sink, ring };

/// A copy from one page, sink slot or ring slot to another, in all layers; of a page, in all layers of its group.
struct CacheCopy {
  CopyKind kind = CopyKind::page;
  std::int32_t from = 0, to = 0;
  std::int32_t group = 0;  ///< of pages
  bool operator==(const CacheCopy&) const = default;
};

/// New tokens of a sequence.
struct Growth {
  std::int32_t sequence = 0, tokens = 0;
};

/// Which sequence has which pages, sink slot and ring slot: host bookkeeping of a paged cache, without device memory.
/// The handle of a sequence is its ring slot.
///
/// Every token is written to its page, so pages are valid for whoever holds them. Beside the pages there are exact
/// rows: of the first sink_tokens tokens in a sink slot, of the last ones in the ring. The token at position p of a
/// sequence of T tokens is exact iff
///
///     p < sink_tokens and the sequence has a sink slot,  or  p >= max(T - recent_tokens, exact_from)
///
/// Pages and sink slots are shared by forks, and by the prefix tree, where insert() registers pages for later sequences
/// that begin with the same tokens. Nobody writes what another can see: grow() names the copies to make first. What
/// only the tree holds is as good as free. It is reused, least recently used first, when nothing else is left; the tree
/// never makes a call fail that succeeds without it.
///
/// Each group of layers has a pool, and a page table for each sequence. With a sliding window W, grow() releases pages
/// that lie before position L - W, where no query can see them any more: L is the length before the step, or that to
/// which rollback() may take the sequence behind it, if it is less. Their entries become kNone. In steps of up to n new
/// tokens a sequence has at most page_run(W + max(n, max_rollback), page_size) pages at once. A page that a fork or the
/// tree holds, too, stays theirs.
///
/// An entry of the tree has its page in every group, so insert() ends at the first page that a group has released: all
/// are there behind the step that wrote them, fewer later. A hit takes of each group the pages that its window sees. A
/// group that keeps no pages reads the ring alone, which begins empty after a hit: with it there are no hits, and
/// insert() registers nothing.
///
/// All functions throw Error{usage} for numbers without sense, such as a sequence that does not exist. Functions that
/// run out of something say so by their result. In both cases nothing changes.
class CacheAllocator {
 public:
  explicit CacheAllocator(const CacheAllocatorOptions& options);

  static constexpr std::int32_t kNone = -1;

  /// A sequence that begins with pages of the tree.
  struct Start {
    std::int32_t sequence = kNone;  ///< kNone if num_sequences exist
    std::int64_t hit_tokens = 0;    ///< length of the sequence
  };
  struct Fork {
    std::int32_t sequence = kNone;  ///< kNone if num_sequences exist
    std::vector<CacheCopy> copies = {};
  };

  /// An empty sequence, or kNone if num_sequences exist. Has no sink slot if sequences hold all of them.
  std::int32_t create();
  /// A sequence that begins with the longest match of the tree, as lookup() tells it, all of it committed. It shares
  /// the sink slot that the tree holds there, if any. Without a match: an empty one, as of create().
  Start create(std::span<const std::int32_t> tokens);
  /// A sequence whose contents the caller copies back from elsewhere, all of them committed.
  /// @param exact_from  as of the sequence whose contents these are, or later: `length` if its ring is not copied back
  /// @param with_sinks  has it a sink slot? Without use if sink_tokens is 0
  /// @return            kNone if pages, the sink slot or the ring slot are missing
  std::int32_t restore(std::int64_t length, std::int64_t exact_from, bool with_sinks = true);
  /// A sequence with the same tokens, all of them committed in both. It has a sink slot only if `sequence` has one: the
  /// same if all sinks are written, else its own, and none if sequences hold all slots.
  /// @return  and what to copy before anything is written
  Fork fork(std::int32_t sequence);
  void destroy(std::int32_t sequence);

  /// Allocates pages for the new tokens of all sequences of the batch, or of none, in all groups. Before that it
  /// releases pages behind sliding windows; the same call may give them out again, so steps before must come first on
  /// the device, too. Afterwards the last max_rollback tokens of each can be taken back, unless they were committed
  /// before. A sequence that would write sinks into a shared slot gets its own, or none if sequences hold all slots:
  /// see sink_slot() afterwards.
  /// @param batch   each sequence at most once
  /// @param copies  result, appended: what to copy before anything is written, in any order
  /// @return        false if there are not enough pages
  [[nodiscard]] bool grow(std::span<const Growth> batch, std::vector<CacheCopy>& copies);
  /// Commits all tokens of the sequence: rollback() can no longer take them back.
  void commit(std::int32_t sequence);
  /// Takes the last tokens back, none of which may be committed, and releases pages that become empty.
  void rollback(std::int32_t sequence, std::int32_t tokens);

  /// Registers the sequence's full pages in the tree, up to the first that a group has released, and with the page of
  /// the last sink the sequence's sink slot. Where the tree has a page of the same tokens it keeps that page, and the
  /// sequence its own. The pages must be written before a later call's sequence reads them.
  /// @param tokens  of the positions 0, 1, ...; pages beyond them, or beyond the length, are left out
  /// @throws        Error{usage} also if the tree has one of the pages with other tokens
  void insert(std::int32_t sequence, std::span<const std::int32_t> tokens);
  /// Tokens of the longest match: whole pages, but not all of `tokens`, because the last one's query is needed, and not
  /// fewer than sink_tokens, because to compute a few tokens is cheaper than to do without exact sinks.
  std::int64_t lookup(std::span<const std::int32_t> tokens) const;
  /// Takes pages of a group out of the tree that nobody else holds, least recently used leaves first; with them go the
  /// other groups' pages of the same tokens.
  /// @param pages  at most so many
  /// @return       how many
  std::int32_t evict(std::int32_t pages, std::int32_t group = 0);

  std::int64_t length(std::int32_t sequence) const { return at(sequence).length; }
  std::int64_t uncommitted(std::int32_t sequence) const { return at(sequence).length - at(sequence).committed; }
  /// First position whose exact row the sequence's ring has held: 0, or the length at the start after a hit.
  std::int64_t exact_from(std::int32_t sequence) const { return at(sequence).exact_from; }
  /// Or kNone: the sequence's sinks are read from its pages.
  std::int32_t sink_slot(std::int32_t sequence) const { return at(sequence).sink; }
  /// Page table of a group: page i holds the positions from i * page_size on. kNone: released, or never kept.
  std::span<const std::int32_t> pages(std::int32_t sequence, std::int32_t group = 0) const {
    return at(sequence).pages[index_of(group)];
  }
  /// First page of a group that a sequence of `length` committed tokens needs; those of all its tokens if the group
  /// keeps none. restore() allocates the pages from there on.
  std::int64_t first_page(std::int64_t length, std::int32_t group = 0) const;

  std::int32_t page_size() const { return options_.page_size; }
  std::int32_t groups() const { return static_cast<std::int32_t>(groups_.size()); }
  std::int32_t users(std::int32_t page, std::int32_t group = 0) const;  ///< sequences, and the tree
  std::int32_t sink_users(std::int32_t slot) const;                     ///< sequences, and entries of the tree
  std::int32_t free_pages(std::int32_t group = 0) const { return pages_[index_of(group)].free(); }
  std::int32_t free_sink_slots() const { return sinks_.free(); }
  std::int32_t evictable_pages(std::int32_t group = 0) const;
  const PrefixTree& tree() const { return tree_; }

 private:
  /// exact_from <= committed <= length. So no rollback reaches a position before exact_from, whose row the ring lacks,
  /// and exact_from stays right for the life of the sequence.
  struct Sequence {
    bool used = false;
    std::int64_t length = 0, committed = 0, exact_from = 0;
    std::int32_t sink = kNone;
    std::vector<std::vector<std::int32_t>> pages = {};  ///< [groups]; pages_for(length) entries each
  };
  using Users = std::map<std::int32_t, std::int32_t>;  ///< of pages of one group
  const Sequence& at(std::int32_t sequence) const;
  Sequence& at(std::int32_t sequence);
  std::size_t index_of(std::int32_t group) const;  ///< checked
  std::int32_t free_sequence() const;
  std::int64_t pages_for(std::int64_t tokens) const { return (tokens + page_size() - 1) / page_size(); }
  bool keeps_pages(std::size_t group) const;
  Sequence empty_sequence() const;
  void share(std::int32_t page, std::size_t group);    ///< kNone: nothing to do
  void release(std::int32_t page, std::size_t group);  ///< likewise
  /// First page that the sequence needs while it grows by `tokens`, and afterwards.
  std::int64_t first_page(const Sequence& sequence, std::int32_t tokens, std::size_t group) const;
  /// The page to which the sequence, if it grows by `tokens`, appends; or kNone.
  std::int32_t page_to_append(const Sequence& sequence, std::int32_t tokens, std::size_t group) const;
  bool writes_shared_sinks(const Sequence& sequence, std::int32_t tokens) const;
  std::vector<std::int32_t> match(std::span<const std::int32_t> tokens) const;
  void check(std::span<const Growth> batch) const;
  void check_insert(std::int32_t sequence, std::size_t full, std::span<const std::int32_t> path) const;

  bool has_room(std::int64_t pages, std::size_t group) const;
  bool has_room(std::span<const Growth> batch, bool with_tree) const;  ///< in all groups
  /// How many sequences of the batch release each page of the group when they grow.
  Users releases(std::span<const Growth> batch, std::size_t group) const;
  /// Pages that the batch takes. @param with_tree  is a page copied also if only the tree shares it?
  /// @param released  users that pages lose before
  std::int64_t needed_pages(std::span<const Growth> batch, bool with_tree, std::size_t group,
                            const Users& released) const;
  bool make_page_room(std::span<const Growth> batch);
  void make_sink_room(std::span<const Growth> batch);
  void release_behind_windows(std::span<const Growth> batch);
  void move_page(Sequence& sequence, std::size_t group, std::vector<CacheCopy>& copies);
  void move_sinks(Sequence& sequence, std::vector<CacheCopy>& copies);
  void append_pages(Sequence& sequence);                       ///< for its length, in all groups
  void free_pages_for(std::int64_t pages, std::size_t group);  ///< evicts what is missing

  std::int32_t take_sink();         ///< or kNone
  bool free_a_sink();               ///< that only the tree holds
  void forget(std::int32_t entry);  ///< and all entries below
  void forget_sink(std::int32_t slot);

  CacheAllocatorOptions options_;
  std::vector<PageGroup> groups_;     ///< one at least
  std::vector<ReferencePool> pages_;  ///< by group
  ReferencePool sinks_;
  std::vector<Sequence> sequences_;  ///< by ring slot
  PrefixTree tree_;
};

}  // namespace kvq
