#include <kvq/runtime/cache_allocator.h>

#include "support/error_of.h"

#include <catch2/catch.hpp>

#include <cstdint>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;

namespace {

constexpr std::int32_t kNone = CacheAllocator::kNone;
using Tokens = std::vector<std::int32_t>;
using Copies = std::vector<CacheCopy>;

Tokens prompt(int count, int first = 0) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

Tokens pages_of(const CacheAllocator& allocator, std::int32_t sequence) {
  const auto pages = allocator.pages(sequence);
  return {pages.begin(), pages.end()};
}

/// Pages of 4 tokens, 6 sinks in pages 0 and 1.
CacheAllocatorOptions options() {
  return {.num_pages = 8, .page_size = 4, .num_sequences = 4, .num_sink_slots = 3, .sink_tokens = 6, .max_rollback = 9};
}

CacheAllocatorOptions without_sinks() {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = o.sink_tokens = 0;
  return o;
}

Copies grow(CacheAllocator& allocator, const std::vector<Growth>& batch) {
  Copies copies;
  REQUIRE(allocator.grow(batch, copies));
  return copies;
}

/// A sequence of `count` tokens, with its full pages in the tree.
std::int32_t donor(CacheAllocator& allocator, const Tokens& tokens) {
  const std::int32_t made = allocator.create();
  REQUIRE(made != kNone);
  REQUIRE(grow(allocator, {{made, static_cast<std::int32_t>(tokens.size())}}).empty());
  allocator.insert(made, tokens);
  return made;
}

}  // namespace

TEST_CASE("A new sequence is empty and has a ring slot, and a sink slot as long as there is one", "[runtime]") {
  CacheAllocator allocator(options());
  for (int i = 0; i < 4; ++i) {
    const std::int32_t made = allocator.create();
    REQUIRE(made == i);
    CHECK(allocator.length(made) == 0);
    CHECK(allocator.exact_from(made) == 0);
    CHECK(allocator.sink_slot(made) == (i < 3 ? i : kNone));
  }
  CHECK(allocator.create() == kNone);
  CHECK(allocator.create(prompt(9)).sequence == kNone);
  allocator.destroy(1);
  CHECK(allocator.free_sink_slots() == 1);
  CHECK(allocator.create() == 1);
  CHECK(allocator.sink_slot(1) == 1);
  CHECK(allocator.sink_slot(3) == kNone);

  CacheAllocatorOptions no_sinks = options();
  no_sinks.sink_tokens = 0;
  CacheAllocator other(no_sinks);
  CHECK(other.sink_slot(other.create()) == kNone);
}

TEST_CASE("A batch gets all its pages or none", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_pages = 3;
  CacheAllocator allocator(o);
  const std::int32_t a = allocator.create(), b = allocator.create();
  Copies copies;
  CHECK_FALSE(allocator.grow(std::vector<Growth>{{a, 8}, {b, 5}}, copies));
  CHECK(allocator.free_pages() == 3);
  CHECK(allocator.length(a) == 0);
  grow(allocator, {{a, 8}, {b, 4}});
  CHECK(allocator.free_pages() == 0);
  CHECK_FALSE(allocator.grow(std::vector<Growth>{{b, 1}}, copies));
  CHECK(copies.empty());
}

TEST_CASE("A hit is whole pages, leaves one token to compute, and is not shorter than the sinks", "[runtime]") {
  CacheAllocator allocator(options());
  const Tokens tokens = prompt(18);
  donor(allocator, tokens);
  CHECK(allocator.tree().size() == 4);  // the fifth page is not full
  const int expected[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 12, 12, 12, 12, 16, 16};
  for (int count = 0; count <= 18; ++count) {
    CAPTURE(count);
    CHECK(allocator.lookup(prompt(count)) == expected[count]);
  }
  Tokens other = tokens;
  other[11] = 99;
  CHECK(allocator.lookup(other) == 8);
  other[7] = 99;
  CHECK(allocator.lookup(other) == 0);
}

TEST_CASE("A hit shares pages and sinks, and has exact rows from there on", "[runtime]") {
  CacheAllocator allocator(options());
  const Tokens tokens = prompt(14);
  const std::int32_t first = donor(allocator, tokens);
  const Tokens pages = pages_of(allocator, first);
  const std::int32_t sinks = allocator.sink_slot(first);
  const bool donor_lives = GENERATE(true, false);
  if (!donor_lives) allocator.destroy(first);
  const CacheAllocator::Start start = allocator.create(tokens);
  REQUIRE(start.sequence != kNone);
  CHECK(start.hit_tokens == 12);
  CHECK(allocator.length(start.sequence) == 12);
  CHECK(allocator.exact_from(start.sequence) == 12);
  CHECK(allocator.uncommitted(start.sequence) == 0);
  CHECK(pages_of(allocator, start.sequence) == Tokens{pages[0], pages[1], pages[2]});
  CHECK(allocator.sink_slot(start.sequence) == sinks);
  CHECK(allocator.sink_users(sinks) == (donor_lives ? 3 : 2));
  CHECK(allocator.users(pages[2]) == (donor_lives ? 3 : 2));
  // Its next tokens go to a page of its own.
  CHECK(grow(allocator, {{start.sequence, 1}}).empty());
  CHECK(allocator.users(allocator.pages(start.sequence)[3]) == 1);
  CHECK_THAT(error_text([&] { allocator.rollback(start.sequence, 2); }), Contains("at most 1 tokens"));
}

TEST_CASE("Without a match a sequence begins empty", "[runtime]") {
  CacheAllocator allocator(options());
  donor(allocator, prompt(7));  // one full page, fewer tokens than sinks
  CHECK(allocator.tree().size() == 1);
  const CacheAllocator::Start start = allocator.create(prompt(7));
  CHECK(start.hit_tokens == 0);
  CHECK(allocator.length(start.sequence) == 0);
  CHECK(allocator.sink_slot(start.sequence) == 1);
}

TEST_CASE("The tree keeps the page that it has, and the sequence its own", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = donor(allocator, prompt(8)), b = donor(allocator, prompt(13));
  CHECK(allocator.tree().size() == 3);
  CHECK(allocator.users(allocator.pages(a)[1]) == 2);
  CHECK(allocator.users(allocator.pages(b)[1]) == 1);
  CHECK(allocator.users(allocator.pages(b)[2]) == 2);
  CHECK(allocator.sink_users(allocator.sink_slot(a)) == 2);
  CHECK(allocator.sink_users(allocator.sink_slot(b)) == 1);
  const std::int32_t c = allocator.create(prompt(13)).sequence;
  CHECK(pages_of(allocator, c) == Tokens{allocator.pages(a)[0], allocator.pages(a)[1], allocator.pages(b)[2]});
  // Pages beyond the tokens that are told are left out.
  grow(allocator, {{c, 8}});
  allocator.insert(c, prompt(19));
  CHECK(allocator.tree().size() == 4);
}

TEST_CASE("An entry without sinks gets those of a later sequence", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = 1;
  CacheAllocator allocator(o);
  const std::int32_t holder = allocator.create(), poor = donor(allocator, prompt(8));
  CHECK(allocator.sink_slot(poor) == kNone);
  const std::int32_t hit = allocator.create(prompt(9)).sequence;
  CHECK(allocator.length(hit) == 8);
  CHECK(allocator.sink_slot(hit) == kNone);
  grow(allocator, {{holder, 9}});
  allocator.insert(holder, prompt(9));
  CHECK(allocator.sink_users(0) == 2);
  CHECK(allocator.sink_slot(allocator.create(prompt(9)).sequence) == 0);
}

TEST_CASE("Pages that only the tree holds go to whoever needs them, the least recently used leaves first",
          "[runtime]") {
  CacheAllocator allocator(without_sinks());
  allocator.destroy(donor(allocator, prompt(12)));
  allocator.destroy(donor(allocator, prompt(8, 100)));
  CHECK(allocator.lookup(prompt(13)) == 12);
  CHECK(allocator.evictable_pages() == 5);
  const std::int32_t a = allocator.create(prompt(9)).sequence;  // uses two pages of the first prompt
  CHECK(allocator.evictable_pages() == 3);
  CHECK(allocator.evict(1) == 1);  // the third, which was not used again
  CHECK(allocator.lookup(prompt(13)) == 8);
  CHECK(allocator.lookup(prompt(9, 100)) == 8);
  CHECK(allocator.free_pages() == 4);
  grow(allocator, {{a, 20}});  // five pages, of which one is the second prompt's second
  CHECK(allocator.lookup(prompt(9, 100)) == 4);
  CHECK(allocator.free_pages() == 0);
  Copies copies;
  CHECK_FALSE(allocator.grow(std::vector<Growth>{{a, 5}}, copies));  // two more: there is one
  CHECK(allocator.lookup(prompt(9, 100)) == 4);
  CHECK(allocator.evict(7) == 1);
  CHECK(allocator.tree().size() == 2);
  CHECK(allocator.evict(7) == 0);
}

TEST_CASE("Unused pages before a page in use can be evicted too", "[runtime]") {
  CacheAllocator allocator(without_sinks());
  const std::int32_t a = donor(allocator, prompt(8)), b = donor(allocator, prompt(12));
  allocator.destroy(a);  // the tree has a's two pages and b's third
  allocator.destroy(donor(allocator, prompt(4, 100)));
  CHECK(allocator.evictable_pages() == 3);
  CHECK(allocator.evict(1) == 1);
  CHECK(allocator.lookup(prompt(5, 100)) == 0);  // used later, but nothing in use is behind it
  CHECK(allocator.lookup(prompt(13)) == 12);
  CHECK(allocator.evict(2) == 2);
  CHECK(allocator.tree().size() == 0);
  CHECK(allocator.users(allocator.pages(b)[2]) == 1);
}

TEST_CASE("Sinks that only the tree holds go to a new sequence, with the entries that need them", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = 2;
  CacheAllocator allocator(o);
  allocator.destroy(donor(allocator, prompt(12)));
  allocator.destroy(donor(allocator, prompt(8, 100)));
  CHECK(allocator.free_sink_slots() == 0);
  CHECK(allocator.create(prompt(9)).hit_tokens == 8);  // used again
  CHECK(allocator.sink_slot(allocator.create()) != kNone);
  CHECK(allocator.lookup(prompt(9, 100)) == 0);
  CHECK(allocator.tree().size() == 4);  // three of the first prompt, and the second's first page
  CHECK(allocator.sink_slot(allocator.create()) == kNone);
  CHECK(allocator.lookup(prompt(13)) == 12);
}

TEST_CASE("Of the sinks that only the tree holds the least recently used go first", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = 2;
  CacheAllocator allocator(o);
  allocator.destroy(donor(allocator, prompt(8)));
  allocator.destroy(donor(allocator, prompt(8, 100)));
  const bool again = GENERATE(false, true);
  if (again) allocator.destroy(allocator.create(prompt(9)).sequence);
  CHECK(allocator.sink_slot(allocator.create()) != kNone);
  CHECK(allocator.lookup(prompt(9)) == (again ? 8 : 0));
  CHECK(allocator.lookup(prompt(9, 100)) == (again ? 0 : 8));
}

TEST_CASE("A fork shares pages, and sinks if all are written", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 6}});
  const CacheAllocator::Fork fork = allocator.fork(a);
  CHECK(fork.copies == Copies{{CopyKind::ring, a, fork.sequence}});
  CHECK(pages_of(allocator, a) == pages_of(allocator, fork.sequence));
  CHECK(allocator.sink_slot(a) == allocator.sink_slot(fork.sequence));
  CHECK(allocator.uncommitted(a) == 0);
  CHECK(allocator.uncommitted(fork.sequence) == 0);
  // The partly full page is copied once, by the first that goes on; the full page never.
  const std::int32_t shared = allocator.pages(a)[1];
  const Copies copies = grow(allocator, {{a, 1}, {fork.sequence, 1}});
  CHECK(copies == Copies{{CopyKind::page, shared, allocator.pages(a)[1]}});
  CHECK(allocator.pages(fork.sequence)[1] == shared);
  CHECK(allocator.pages(a)[1] != shared);
  CHECK(allocator.pages(a)[0] == allocator.pages(fork.sequence)[0]);
}

TEST_CASE("A fork amid the sinks gets its own, or none", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = 2;
  CacheAllocator allocator(o);
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 5}});
  const CacheAllocator::Fork b = allocator.fork(a), c = allocator.fork(a);
  CHECK(b.copies == Copies{{CopyKind::ring, a, b.sequence}, {CopyKind::sink, 0, 1}});
  CHECK(allocator.sink_slot(b.sequence) == 1);
  CHECK(c.copies == Copies{{CopyKind::ring, a, c.sequence}});
  CHECK(allocator.sink_slot(c.sequence) == kNone);
  CHECK(allocator.fork(c.sequence).copies.size() == 1);
  CHECK(allocator.fork(a).sequence == kNone);
}

TEST_CASE("A page that is in the tree and was partly taken back is copied before it is written", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = donor(allocator, prompt(17));
  const Tokens old = pages_of(allocator, a);
  allocator.rollback(a, 6);  // position 11 is in the third page of five
  CHECK(pages_of(allocator, a) == Tokens{old[0], old[1], old[2]});
  CHECK(allocator.free_pages() == 4);
  const Copies copies = grow(allocator, {{a, 1}});
  CHECK(copies == Copies{{CopyKind::page, old[2], allocator.pages(a)[2]}});
  CHECK(allocator.pages(a)[2] != old[2]);
  CHECK(allocator.users(old[2]) == 1);
  CHECK(allocator.lookup(prompt(17)) == 16);
  // At the border of a page there is nothing to copy.
  allocator.rollback(a, 1);
  CHECK(grow(allocator, {{a, 1}}).empty());
  const std::int32_t b = allocator.create(prompt(17)).sequence;
  CHECK(allocator.length(b) == 16);
  CHECK(allocator.pages(b)[2] == old[2]);
}

TEST_CASE("A page of the tree is forgotten if there is none for its copy", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_pages = 3;
  CacheAllocator allocator(o);
  const std::int32_t a = donor(allocator, prompt(12));
  const Tokens old = pages_of(allocator, a);
  allocator.rollback(a, 1);
  CHECK(grow(allocator, {{a, 1}}).empty());
  CHECK(pages_of(allocator, a) == old);
  CHECK(allocator.tree().size() == 2);
  // A page of another sequence is not.
  const std::int32_t b = allocator.create(prompt(9)).sequence;
  CHECK(allocator.length(b) == 8);
  Copies copies;
  allocator.rollback(a, 5);
  CHECK(allocator.free_pages() == 1);
  CHECK(grow(allocator, {{b, 1}}).empty());
  CHECK_FALSE(allocator.grow(std::vector<Growth>{{a, 1}}, copies));
  CHECK(allocator.tree().size() == 2);
}

TEST_CASE("Shared sinks that were taken back are copied before they are written, or given up", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = 2;
  CacheAllocator allocator(o);
  const std::int32_t a = donor(allocator, prompt(9)), b = allocator.create(prompt(9)).sequence;
  CHECK(allocator.sink_users(0) == 3);
  allocator.rollback(a, 4);
  SECTION("with a free slot they are copied") {
    const std::int32_t page = allocator.pages(a)[1];
    const Copies copies = grow(allocator, {{a, 1}});
    CHECK(copies == Copies{{CopyKind::page, page, allocator.pages(a)[1]}, {CopyKind::sink, 0, 1}});
    CHECK(allocator.sink_slot(a) == 1);
    CHECK(allocator.sink_slot(b) == 0);
    CHECK(grow(allocator, {{a, 1}}).empty());
  }
  SECTION("without one, and another sequence reads them: given up") {
    REQUIRE(allocator.sink_slot(allocator.create()) == 1);
    CHECK(grow(allocator, {{a, 1}}).size() == 1);  // the page
    CHECK(allocator.sink_slot(a) == kNone);
    CHECK(allocator.sink_slot(b) == 0);
    CHECK(allocator.sink_users(0) == 2);
  }
  SECTION("without one, and only the tree holds them: the tree forgets them") {
    REQUIRE(allocator.sink_slot(allocator.create()) == 1);
    allocator.destroy(b);
    CHECK(grow(allocator, {{a, 1}}).empty());
    CHECK(allocator.sink_slot(a) == 0);
    CHECK(allocator.sink_users(0) == 1);
    CHECK(allocator.tree().size() == 1);
  }
  SECTION("beyond the sinks nothing is copied") {
    CHECK(grow(allocator, {{a, 0}}).empty());
    allocator.destroy(a);
    CHECK(grow(allocator, {{b, 3}}).empty());
  }
}

TEST_CASE("In one batch, free sink slots go first, then those of the tree, and no copy needs another's", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_pages = 12, o.num_sequences = 5, o.num_sink_slots = 4;
  CacheAllocator allocator(o);
  const std::int32_t a = donor(allocator, prompt(8)), b = donor(allocator, prompt(8, 100));
  const std::int32_t c = donor(allocator, prompt(8, 200));
  allocator.create(prompt(9));
  allocator.create(prompt(9, 100));
  allocator.destroy(c);
  allocator.rollback(a, 3), allocator.rollback(b, 3);
  CHECK(allocator.free_sink_slots() == 1);
  Copies copies = grow(allocator, {{a, 1}, {b, 1}});
  std::erase_if(copies, [](const CacheCopy& copy) { return copy.kind != CopyKind::sink; });
  CHECK(copies == Copies{{CopyKind::sink, 0, 2}, {CopyKind::sink, 1, 3}});
  CHECK(allocator.lookup(prompt(9, 200)) == 0);
  CHECK(allocator.lookup(prompt(9)) == 8);
  CHECK(allocator.lookup(prompt(9, 100)) == 8);
}

TEST_CASE("Tokens are taken back as far as they are not committed", "[runtime]") {
  CacheAllocator allocator(without_sinks());
  const std::int32_t a = allocator.create();
  grow(allocator, {{a, 7}});
  CHECK(allocator.uncommitted(a) == 7);
  grow(allocator, {{a, 5}});
  CHECK(allocator.uncommitted(a) == 9);
  allocator.rollback(a, 9);
  CHECK(allocator.length(a) == 3);
  CHECK(allocator.free_pages() == 7);
  grow(allocator, {{a, 2}});
  CHECK(allocator.uncommitted(a) == 2);
  allocator.commit(a);
  CHECK(allocator.uncommitted(a) == 0);
}

TEST_CASE("A restored sequence has what its contents need, or is not made", "[runtime]") {
  CacheAllocatorOptions o = options();
  o.num_sink_slots = 1;
  CacheAllocator allocator(o);
  const std::int32_t a = allocator.restore(13, 9);
  CHECK(allocator.length(a) == 13);
  CHECK(allocator.exact_from(a) == 9);
  CHECK(allocator.uncommitted(a) == 0);
  CHECK(allocator.pages(a).size() == 4);
  CHECK(allocator.sink_slot(a) == 0);
  CHECK(allocator.restore(3, 0) == kNone);  // no sink slot
  const std::int32_t b = allocator.restore(3, 0, false);
  CHECK(allocator.sink_slot(b) == kNone);
  CHECK(allocator.free_pages() == 3);
  CHECK(allocator.restore(13, 0, false) == kNone);
  CHECK(allocator.free_pages() == 3);
  // What only the tree holds makes room.
  allocator.insert(a, prompt(13));
  allocator.destroy(a);
  CHECK(allocator.tree().size() == 3);
  CHECK(allocator.free_pages() == 4);
  const std::int32_t c = allocator.restore(17, 17, false);
  CHECK(allocator.pages(c).size() == 5);
  CHECK(allocator.tree().size() == 2);
  CHECK(allocator.free_sink_slots() == 0);
  allocator.destroy(c);
  CHECK(allocator.restore(17, 17) != kNone);
  CHECK(allocator.tree().size() == 1);
  CHECK(allocator.restore(0, 0, false) != kNone);
  CHECK(allocator.restore(0, 0, false) != kNone);
  CHECK(allocator.restore(0, 0, false) == kNone);
}

TEST_CASE("What a cache allocator is asked for wrongly is refused by name", "[runtime]") {
  CacheAllocator allocator(options());
  const std::int32_t a = allocator.create(), b = allocator.create();
  Copies copies;
  const auto grows = [&](std::vector<Growth> batch) {
    return error_text([&] { (void)allocator.grow(batch, copies); });
  };
  CHECK_THAT(error_text([] { CacheAllocator({.num_pages = 4}); }), Contains("usage: cache allocator: 4 pages of 0"));
  CHECK_THAT(error_text([] { CacheAllocator({.page_size = 1, .sink_tokens = -1}); }), Contains("slots of -1 tokens"));
  CHECK_THAT(error_text([&] { allocator.length(2); }), Contains("no sequence 2"));
  CHECK_THAT(error_text([&] { allocator.destroy(7); }), Contains("no sequence 7"));
  CHECK_THAT(error_text([&] { allocator.commit(-1); }), Contains("no sequence -1"));
  CHECK_THAT(error_text([&] { allocator.fork(3); }), Contains("no sequence 3"));
  CHECK_THAT(error_text([&] { allocator.users(8); }), Contains("no page 8"));
  CHECK_THAT(error_text([&] { allocator.sink_users(3); }), Contains("no sink slot 3"));
  CHECK_THAT(error_text([&] { allocator.evict(-1); }), Contains("evict -1 pages"));
  CHECK_THAT(error_text([&] { allocator.restore(3, 4); }), Contains("3 tokens with exact rows from 4 on"));
  CHECK_THAT(error_text([&] { allocator.restore(-1, -1); }), Contains("sequence of -1 tokens"));
  CHECK_THAT(error_text([&] { allocator.restore(std::int64_t{1} << 31, 0); }), Contains("of 2147483648 tokens"));
  CHECK_THAT(grows({{a, 1}, {a, 1}}), Contains("twice"));
  CHECK_THAT(grows({{a, -1}}), Contains("-1 more"));
  REQUIRE(allocator.grow(std::vector<Growth>{{a, 10}}, copies));
  CHECK_THAT(grows({{b, 1}, {a, 2147483638}}), Contains("10 tokens and 2147483638 more"));
  CHECK(allocator.length(b) == 0);
  CHECK_THAT(error_text([&] { allocator.rollback(a, 10); }), Contains("at most 9 tokens, found 10"));
  CHECK_THAT(error_text([&] { allocator.rollback(a, -1); }), Contains("at most 9 tokens, found -1"));
  allocator.insert(a, prompt(4));
  CHECK_THAT(error_text([&] { allocator.insert(a, prompt(8, 1)); }), Contains("with other tokens"));
  CHECK(allocator.tree().size() == 1);
  CHECK(copies.empty());
}
