#include <kvq/core/error.h>
#include <kvq/runtime/page_allocator.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

namespace kvq {

PageAllocator::PageAllocator(std::int32_t num_pages, std::int32_t page_size, std::int32_t num_slots,
                             std::int32_t max_rollback)
    : page_size_(page_size), max_rollback_(max_rollback) {
  if (num_pages < 0 || page_size < 1 || num_slots < 0 || max_rollback < 0)
    throw Error{ErrorKind::usage,
                fmt::format("page allocator: {} pages of {} tokens, {} slots, {} tokens taken back at once", num_pages,
                            page_size, num_slots, max_rollback)};
  free_.resize(static_cast<std::size_t>(num_pages));
  std::iota(free_.rbegin(), free_.rend(), 0);
  users_.resize(free_.size());
  sequences_.resize(static_cast<std::size_t>(num_slots));
}

const PageAllocator::Sequence& PageAllocator::at(std::int32_t sequence) const {
  if (sequence < 0 || sequence >= static_cast<std::int32_t>(sequences_.size()) ||
      !sequences_[static_cast<std::size_t>(sequence)].used)
    throw Error{ErrorKind::usage, fmt::format("page allocator: there is no sequence {}", sequence)};
  return sequences_[static_cast<std::size_t>(sequence)];
}

PageAllocator::Sequence& PageAllocator::at(std::int32_t sequence) {
  return const_cast<Sequence&>(static_cast<const PageAllocator*>(this)->at(sequence));
}

std::int32_t PageAllocator::create() {
  const auto slot = std::find_if(sequences_.begin(), sequences_.end(), [](const Sequence& s) { return !s.used; });
  if (slot == sequences_.end()) return kNone;
  *slot = Sequence{.used = true};
  return static_cast<std::int32_t>(slot - sequences_.begin());
}

std::int32_t PageAllocator::fork(std::int32_t sequence) {
  const std::int32_t made = create();
  if (made == kNone) return kNone;
  commit(sequence);
  at(made) = at(sequence);
  for (const std::int32_t page : at(made).pages) ++users_[static_cast<std::size_t>(page)];
  return made;
}

void PageAllocator::destroy(std::int32_t sequence) {
  for (const std::int32_t page : at(sequence).pages) release(page);
  at(sequence) = Sequence{};
}

bool PageAllocator::goes_on(const Sequence& sequence, std::int32_t tokens) const {
  return tokens > 0 && sequence.length % page_size_ != 0;
}

std::int64_t PageAllocator::missing_pages(std::span<const Growth> batch) const {
  std::int64_t needed = 0;
  std::map<std::int32_t, std::int32_t> left;  // users of each shared last page that have not yet moved to a copy
  for (const Growth& g : batch) {
    const Sequence& s = at(g.sequence);
    needed += pages_for(s.length + g.tokens) - pages_for(s.length);
    if (!goes_on(s, g.tokens)) continue;
    std::int32_t& users =
        left.try_emplace(s.pages.back(), users_[static_cast<std::size_t>(s.pages.back())]).first->second;
    if (users > 1) --users, ++needed;
  }
  return needed - static_cast<std::int64_t>(free_.size());
}

bool PageAllocator::grow(std::span<const Growth> batch, std::vector<PageCopy>& copies) {
  std::set<std::int32_t> seen;
  for (const Growth& g : batch) {
    if (g.tokens < 0 || at(g.sequence).length > std::numeric_limits<std::int32_t>::max() - g.tokens)
      throw Error{ErrorKind::usage, fmt::format("page allocator: sequence {} of {} tokens and {} more", g.sequence,
                                                at(g.sequence).length, g.tokens)};
    if (!seen.insert(g.sequence).second)
      throw Error{ErrorKind::usage, fmt::format("page allocator: sequence {} is twice in a batch", g.sequence)};
  }
  if (missing_pages(batch) > 0) return false;
  for (const Growth& g : batch) {
    Sequence& s = at(g.sequence);
    if (goes_on(s, g.tokens) && users(s.pages.back()) > 1) {
      const PageCopy copy{s.pages.back(), take()};
      release(copy.from);
      s.pages.back() = copy.to;
      copies.push_back(copy);
    }
    s.length += g.tokens;
    while (static_cast<std::int64_t>(s.pages.size()) < pages_for(s.length)) s.pages.push_back(take());
    s.committed = std::max(s.committed, s.length - max_rollback_);
  }
  return true;
}

void PageAllocator::commit(std::int32_t sequence) { at(sequence).committed = at(sequence).length; }

void PageAllocator::rollback(std::int32_t sequence, std::int32_t tokens) {
  Sequence& s = at(sequence);
  if (tokens < 0 || tokens > s.length - s.committed)
    throw Error{ErrorKind::usage,
                fmt::format("page allocator: sequence {}: expected to take back at most {} tokens, found {}", sequence,
                            s.length - s.committed, tokens)};
  s.length -= tokens;
  while (static_cast<std::int64_t>(s.pages.size()) > pages_for(s.length)) {
    release(s.pages.back());
    s.pages.pop_back();
  }
}

std::int32_t PageAllocator::take() {
  const std::int32_t page = free_.back();
  free_.pop_back();
  users_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void PageAllocator::release(std::int32_t page) {
  if (--users_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
}

}  // namespace kvq
