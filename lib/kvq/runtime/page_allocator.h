#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// A copy from one page, or one window slot, to another.
struct PageCopy {
  std::int32_t from = 0, to = 0;
  bool operator==(const PageCopy&) const = default;
};

/// New tokens of a sequence.
struct Growth {
  std::int32_t sequence = 0, tokens = 0;
};

/// Which sequence has which pages: host bookkeeping of a paged cache, without any device memory. One page number stands
/// for that page of every layer. The handle of a sequence is its window slot.
///
/// Forked sequences share pages. A shared last page that is only partly full is copied before either sequence appends
/// to it. Full pages stay shared, because no later write changes them.
///
/// All functions throw Error{usage} for a sequence that does not exist. Functions that run out of pages or slots say so
/// by their result and change nothing.
class PageAllocator {
 public:
  /// @param page_size     tokens
  /// @param max_rollback  most tokens that are taken back at once
  PageAllocator(std::int32_t num_pages, std::int32_t page_size, std::int32_t num_slots, std::int32_t max_rollback);

  static constexpr std::int32_t kNone = -1;

  /// An empty sequence, or kNone if all slots are taken.
  std::int32_t create();
  /// A new sequence with the same tokens, all of them committed in both, or kNone if all slots are taken. The caller
  /// must copy the window slot.
  std::int32_t fork(std::int32_t sequence);
  void destroy(std::int32_t sequence);

  /// Allocates pages for the new tokens of all sequences of the batch, or of none. Afterwards the last max_rollback
  /// tokens of each can be taken back, unless they were committed before.
  /// @param batch   each sequence at most once
  /// @param copies  result: the pages to copy before anything is written
  /// @return        false if there are not enough pages
  [[nodiscard]] bool grow(std::span<const Growth> batch, std::vector<PageCopy>& copies);

  /// Commits all tokens of the sequence: rollback() can no longer take them back.
  void commit(std::int32_t sequence);
  /// Takes the last tokens back, none of which may be committed, and frees pages that become empty.
  /// @throws  Error{usage} if fewer tokens are uncommitted
  void rollback(std::int32_t sequence, std::int32_t tokens);

  std::int64_t length(std::int32_t sequence) const { return at(sequence).length; }
  std::int64_t uncommitted(std::int32_t sequence) const { return at(sequence).length - at(sequence).committed; }
  /// Page table: page i holds the positions from i * page_size on.
  std::span<const std::int32_t> pages(std::int32_t sequence) const { return at(sequence).pages; }
  std::int32_t page_size() const { return page_size_; }
  std::int32_t free_pages() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t users(std::int32_t page) const { return users_[static_cast<std::size_t>(page)]; }

 private:
  struct Sequence {
    bool used = false;
    std::int64_t length = 0, committed = 0;
    std::vector<std::int32_t> pages = {};
  };
  const Sequence& at(std::int32_t sequence) const;
  Sequence& at(std::int32_t sequence);
  std::int64_t pages_for(std::int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }
  /// Will the sequence, if it grows by `tokens`, append to its last page?
  bool goes_on(const Sequence& sequence, std::int32_t tokens) const;
  std::int64_t missing_pages(std::span<const Growth> batch) const;
  std::int32_t take();
  void release(std::int32_t page);

  std::int32_t page_size_, max_rollback_;
  std::vector<std::int32_t> free_;   ///< stack of free pages
  std::vector<std::int32_t> users_;  ///< number of sequences that have each page
  std::vector<Sequence> sequences_;  ///< by slot
};

}  // namespace kvq
