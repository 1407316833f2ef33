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

/// Tokens that a sequence is to get.
struct Growth {
  std::int32_t sequence = 0, tokens = 0;
};

/// Who has which page: host bookkeeping of a paged cache, without any memory of its own. One page number stands for
/// that page of every layer. A sequence is named by its window slot.
///
/// Sequences that were forked share pages; a shared last page that is only partly full is copied before either of them
/// goes on in it. Full pages stay shared: what a position holds there does not depend on who writes it.
///
/// All functions throw Error{usage} for a sequence that does not exist; those that can fail for want of space say so
/// and then change nothing.
class PageAllocator {
 public:
  /// @param page_size     tokens
  /// @param max_rollback  most tokens that are taken back at once
  PageAllocator(std::int32_t num_pages, std::int32_t page_size, std::int32_t num_slots, std::int32_t max_rollback);

  static constexpr std::int32_t kNone = -1;

  /// An empty sequence, or kNone if all slots are taken.
  std::int32_t create();
  /// A new sequence with the same tokens, all of them committed in both, or kNone. Its window slot must be copied.
  std::int32_t fork(std::int32_t sequence);
  void destroy(std::int32_t sequence);

  /// Gives all of these sequences room for their new tokens, or none of them. The last max_rollback tokens of each, as
  /// far as they were not committed before, can be taken back.
  /// @param batch   each sequence at most once
  /// @param copies  gets the pages to copy before anything is written
  [[nodiscard]] bool grow(std::span<const Growth> batch, std::vector<PageCopy>& copies);

  /// The sequence's tokens stay: rollback() no longer reaches them.
  void commit(std::int32_t sequence);
  /// Takes the last tokens back, none of them committed, and gives back pages that hold none any more.
  /// @throws  Error{usage} for more than are not committed
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
  /// Does the sequence, to be grown, go on in its last page?
  bool goes_on(const Sequence& sequence, std::int32_t tokens) const;
  std::int64_t missing_pages(std::span<const Growth> batch) const;
  std::int32_t take();
  void release(std::int32_t page);

  std::int32_t page_size_, max_rollback_;
  std::vector<std::int32_t> free_;   ///< pages, the next one last
  std::vector<std::int32_t> users_;  ///< of each page
  std::vector<Sequence> sequences_;  ///< by slot
};

}  // namespace kvq
