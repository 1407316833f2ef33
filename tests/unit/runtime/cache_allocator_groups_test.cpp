#include <kvq/runtime/cache_allocator.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

/// Groups of layers by hand; cache_allocator_property_test.cpp has their random lives.
using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;

namespace {

constexpr std::int32_t kNone = CacheAllocator::kNone, kFull = 0, kSliding = 1;
using Tokens = std::vector<std::int32_t>;
using Copies = std::vector<CacheCopy>;

/// Pages of 4 tokens; full attention, and a window of 6 tokens.
CacheAllocatorOptions options(std::int32_t full_pages = 20, std::int32_t sliding_pages = 20) {
  return {.page_size = 4,
          .num_sequences = 3,
          .max_rollback = 1,
          .groups = {{.num_pages = full_pages}, {.num_pages = sliding_pages, .sliding_window = 6}}};
}

Tokens prompt(int count) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(i);
  return tokens;
}

/// 1 for each page that the sequence has in the group, else 0.
Tokens has(const CacheAllocator& allocator, std::int32_t sequence, std::int32_t group) {
  Tokens found;
  for (const std::int32_t page : allocator.pages(sequence, group)) found.push_back(page != kNone);
  return found;
}

Copies grow(CacheAllocator& allocator, const std::vector<Growth>& batch) {
  Copies copies;
  REQUIRE(allocator.grow(batch, copies));
  return copies;
}

}  // namespace

TEST_CASE("Pages go back to the group's pool as soon as no query can see them", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t s = allocator.create();
  grow(allocator, {{s, 10}});  // the queries of this step see position 0
  CHECK(has(allocator, s, kSliding) == Tokens{1, 1, 1});
  // The least length is that before the step, or one below that after it. Least length 10 sees positions from 4 on.
  grow(allocator, {{s, 1}});
  CHECK(has(allocator, s, kSliding) == Tokens{0, 1, 1});
  CHECK(has(allocator, s, kFull) == Tokens{1, 1, 1});
  CHECK(allocator.free_pages(kFull) == 17);
  CHECK(allocator.free_pages(kSliding) == 18);
  for (int length = 12; length <= 14; ++length) grow(allocator, {{s, 1}});  // least length 13: from 7 on
  CHECK(has(allocator, s, kSliding) == Tokens{0, 1, 1, 1});
  grow(allocator, {{s, 1}});  // 14: from 8 on
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 1, 1});
  grow(allocator, {{s, 0}});
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 1, 1});
  grow(allocator, {{s, 30}});  // the first query of many still sees position 9; those behind have their pages
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  grow(allocator, {{s, 1}});
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1});
  CHECK(has(allocator, s, kFull) == Tokens(12, 1));
  allocator.destroy(s);
  CHECK(allocator.free_pages(kFull) == 20);
  CHECK(allocator.free_pages(kSliding) == 20);
}

TEST_CASE("Tokens that may be taken back keep the pages that their predecessors see", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.max_rollback = 5;
  CacheAllocator allocator(o);
  const std::int32_t s = allocator.create();
  grow(allocator, {{s, 14}});
  grow(allocator, {{s, 1}});  // 10 is the least length after rollback(): from 4 on
  CHECK(has(allocator, s, kSliding) == Tokens{0, 1, 1, 1});
  allocator.rollback(s, 5);
  CHECK(has(allocator, s, kSliding) == Tokens{0, 1, 1});
  CHECK(allocator.free_pages(kSliding) == 18);
  grow(allocator, {{s, 5}});
  CHECK(has(allocator, s, kSliding) == Tokens{0, 1, 1, 1});
  allocator.commit(s);
  grow(allocator, {{s, 0}});  // none of the 15 goes back any more: from 9 on
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 1, 1});
}

TEST_CASE("A sequence never has more pages than page_run() says", "[runtime]") {
  CHECK(page_run(0, 4) == 0);
  CHECK(page_run(1, 4) == 1);
  CHECK(page_run(2, 4) == 2);
  CHECK(page_run(5, 4) == 2);
  CHECK(page_run(6, 4) == 3);
  CHECK(page_run(9, 4) == 3);
  CHECK(page_run(10, 4) == 4);
  const int step = GENERATE(1, 2, 7), rollback = GENERATE(0, 1, 3);
  const auto most = static_cast<std::int32_t>(page_run(6 + std::max(step, rollback), 4));
  const auto lives = [&](std::int32_t sliding_pages) {
    CacheAllocatorOptions o = options(100, sliding_pages);
    o.max_rollback = rollback;
    CacheAllocator allocator(o);
    const std::int32_t s = allocator.create();
    Copies copies;
    while (allocator.length(s) < 200) {
      if (!allocator.grow(std::vector<Growth>{{s, step}}, copies)) return false;
      const Tokens found = has(allocator, s, kSliding);
      CHECK(std::count(found.begin(), found.end(), 1) <= most);
    }
    return copies.empty();
  };
  CAPTURE(step, rollback, most);
  CHECK(lives(most));
  // Every offset in a page occurs unless steps and pages have a common factor.
  if (step % 2 == 1) CHECK_FALSE(lives(most - 1));
}

TEST_CASE("A group without pages has none, and no sequence begins with a hit", "[runtime]") {
  CacheAllocator allocator(options(20, 0));
  const std::int32_t s = allocator.create();
  grow(allocator, {{s, 10}});
  CHECK(has(allocator, s, kFull) == Tokens{1, 1, 1});
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 0});
  const std::int32_t fork = allocator.fork(s).sequence;
  CHECK(grow(allocator, {{s, 1}, {fork, 4}}) == Copies{{CopyKind::page, 2, 3, kFull}});
  CHECK(has(allocator, fork, kSliding) == Tokens{0, 0, 0, 0});
  allocator.rollback(fork, 1);
  allocator.insert(s, prompt(10));
  CHECK(allocator.tree().size() == 0);
  CHECK(allocator.create(prompt(10)).hit_tokens == 0);
  CHECK(allocator.free_pages(kSliding) == 0);
}

TEST_CASE("A batch gets all its pages in all groups, or none", "[runtime]") {
  CacheAllocator allocator(options(20, 3));
  const std::int32_t a = allocator.create(), b = allocator.create();
  grow(allocator, {{a, 10}});
  Copies copies;
  CHECK_FALSE(allocator.grow(std::vector<Growth>{{b, 5}}, copies));
  CHECK(allocator.free_pages(kFull) == 17);
  CHECK(allocator.length(b) == 0);
  // What one sequence of the batch releases, another takes.
  grow(allocator, {{a, 1}, {b, 4}});
  CHECK(has(allocator, a, kSliding) == Tokens{0, 1, 1});
  CHECK(allocator.pages(b, kSliding)[0] == 0);
  CHECK(allocator.free_pages(kSliding) == 0);
  CHECK_FALSE(allocator.grow(std::vector<Growth>{{a, 2}}, copies));
  CHECK(has(allocator, a, kSliding) == Tokens{0, 1, 1});
}

TEST_CASE("Forks share pages, copy what they write, and release for themselves", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 10}});
  const std::int32_t b = allocator.fork(a).sequence;
  // Both append to a shared page in both groups: the first one moves. It also releases its first page, which b keeps.
  CHECK(grow(allocator, {{a, 1}}) == Copies{{CopyKind::page, 2, 3, kFull}, {CopyKind::page, 2, 3, kSliding}});
  CHECK(has(allocator, a, kSliding) == Tokens{0, 1, 1});
  CHECK(has(allocator, b, kSliding) == Tokens{1, 1, 1});
  CHECK(allocator.users(0, kSliding) == 1);
  CHECK(allocator.users(0, kFull) == 2);
  CHECK(grow(allocator, {{b, 1}}).empty());
  CHECK(allocator.users(0, kSliding) == 0);
}

TEST_CASE("The tree keeps pages that sequences release, and a hit takes those that it sees", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 18}});
  allocator.insert(a, prompt(18));
  CHECK(allocator.tree().size() == 4);
  grow(allocator, {{a, 1}});
  CHECK(has(allocator, a, kSliding) == Tokens{0, 0, 0, 1, 1});
  CHECK(allocator.users(0, kSliding) == 1);  // the tree
  CHECK(allocator.evictable_pages(kSliding) == 3);
  CHECK(allocator.evictable_pages(kFull) == 0);
  const std::int32_t whole = allocator.create(prompt(17)).sequence, part = allocator.create(prompt(12)).sequence;
  CHECK(has(allocator, whole, kFull) == Tokens{1, 1, 1, 1});
  CHECK(has(allocator, whole, kSliding) == Tokens{0, 0, 1, 1});  // 16 tokens: from 10 on
  CHECK(has(allocator, part, kFull) == Tokens{1, 1});
  CHECK(has(allocator, part, kSliding) == Tokens{1, 1});  // 8 tokens: from 2 on
  CHECK(allocator.pages(whole, kSliding)[3] == allocator.pages(a, kSliding)[3]);
  allocator.destroy(whole), allocator.destroy(part);
  // What goes in one group goes in all, with everything behind it: page 2 is a leaf's parent that nobody sees.
  CHECK(allocator.evict(1, kSliding) == 1);
  CHECK(allocator.lookup(prompt(18)) == 8);
  CHECK(has(allocator, a, kFull) == Tokens{1, 1, 1, 1, 1});
  CHECK(allocator.evictable_pages(kSliding) == 2);
}

TEST_CASE("Pages of the tree make room in the group that lacks it", "[runtime]") {
  CacheAllocator allocator(options(20, 5));
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 12}});
  allocator.insert(a, prompt(12));
  allocator.destroy(a);
  CHECK(allocator.free_pages(kSliding) == 2);
  const std::int32_t b = allocator.create();
  grow(allocator, {{b, 16}});
  CHECK(allocator.tree().size() == 1);
  CHECK(allocator.free_pages(kFull) == 15);
  CHECK(allocator.free_pages(kSliding) == 0);
}

TEST_CASE("Who inserts late inserts what no group has released", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 18}});
  const bool early = GENERATE(false, true);
  if (early) allocator.insert(a, prompt(9));
  grow(allocator, {{a, 1}});
  allocator.insert(a, prompt(19));
  CHECK(allocator.tree().size() == (early ? 2 : 0));  // the page behind these is released
  CHECK(allocator.lookup(prompt(19)) == (early ? 8 : 0));
}

TEST_CASE("A restored sequence has the pages that it sees", "[runtime]") {
  CacheAllocator allocator(options(20, 3));
  CHECK(allocator.first_page(14, kFull) == 0);
  CHECK(allocator.first_page(14, kSliding) == 2);
  CHECK(allocator.first_page(13, kSliding) == 1);
  CHECK(allocator.first_page(6, kSliding) == 0);
  const std::int32_t s = allocator.restore(14, 0);
  REQUIRE(s != kNone);
  CHECK(has(allocator, s, kFull) == Tokens{1, 1, 1, 1});
  CHECK(has(allocator, s, kSliding) == Tokens{0, 0, 1, 1});
  CHECK(allocator.restore(8, 0) == kNone);
  CHECK(allocator.free_pages(kFull) == 16);
  CHECK(allocator.free_pages(kSliding) == 1);
  CHECK(allocator.restore(4, 0) != kNone);
}

TEST_CASE("Groups that cannot be are refused", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_pages = 3;
  CHECK_THAT(error_text([&] { CacheAllocator made(o); }), Contains("3 pages beside those of groups"));
  o = options(20, -1);
  CHECK_THAT(error_text([&] { CacheAllocator made(o); }), Contains("a group of -1 pages and a sliding window of 6"));
  CacheAllocator allocator(options());
  const std::int32_t s = allocator.create();
  CHECK_THAT(error_text([&] { allocator.pages(s, 2); }), Contains("there is no group 2"));
  CHECK_THAT(error_text([&] { allocator.evict(1, -1); }), Contains("there is no group -1"));
  CHECK_THAT(error_text([&] { allocator.users(20, kSliding); }), Contains("there is no page 20"));
}
