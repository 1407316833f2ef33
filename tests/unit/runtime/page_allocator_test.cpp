#include <kvq/runtime/page_allocator.h>

#include "support/error_of.h"
#include "support/random_data.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <map>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;
using test::error_text;

namespace {

/// Reference of the allocator: page contents, and the contents that sequences should have. Every write has its own
/// number.
class Model {
 public:
  Model(int num_pages, int page_size, int num_slots, int max_rollback)
      : allocator(num_pages, page_size, num_slots, max_rollback),
        num_pages_(num_pages),
        memory_(static_cast<std::size_t>(num_pages * page_size), -1) {}

  PageAllocator allocator;
  std::map<int, std::vector<int>> tokens;  ///< by sequence

  bool grow(const std::vector<Growth>& batch) {
    std::vector<PageCopy> copies;
    if (!allocator.grow(batch, copies)) {
      CHECK(copies.empty());
      return false;
    }
    const auto size = static_cast<std::size_t>(allocator.page_size());
    for (const PageCopy& c : copies)
      for (std::size_t i = 0; i < size; ++i)
        memory_[static_cast<std::size_t>(c.to) * size + i] = memory_[static_cast<std::size_t>(c.from) * size + i];
    for (const Growth& g : batch)
      for (int i = 0; i < g.tokens; ++i) {
        cell(g.sequence, tokens[g.sequence].size()) = ++written_;
        tokens[g.sequence].push_back(written_);
      }
    return true;
  }

  void check() {
    std::vector<int> users(static_cast<std::size_t>(num_pages_));
    for (const auto& [sequence, expected] : tokens) {
      CAPTURE(sequence);
      REQUIRE(allocator.length(sequence) == static_cast<std::int64_t>(expected.size()));
      REQUIRE(allocator.pages(sequence).size() ==
              (expected.size() + static_cast<std::size_t>(allocator.page_size()) - 1) /
                  static_cast<std::size_t>(allocator.page_size()));
      for (std::size_t i = 0; i < expected.size(); ++i) REQUIRE(cell(sequence, i) == expected[i]);
      for (const int page : allocator.pages(sequence)) ++users[static_cast<std::size_t>(page)];
    }
    int taken = 0;
    for (int page = 0; page < num_pages_; ++page) {
      const int found = users[static_cast<std::size_t>(page)];
      if (found > 0) REQUIRE(allocator.users(page) == found);
      taken += found > 0;
    }
    REQUIRE(allocator.free_pages() == num_pages_ - taken);
  }

 private:
  int& cell(int sequence, std::size_t position) {
    const auto size = static_cast<std::size_t>(allocator.page_size());
    return memory_[static_cast<std::size_t>(allocator.pages(sequence)[position / size]) * size + position % size];
  }

  int num_pages_, written_ = 0;
  std::vector<int> memory_;
};

}  // namespace

TEST_CASE("Sequences keep their tokens through any schedule of growing, forking, taking back and ending",
          "[runtime][property]") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    test::Random random(seed);
    const int page_size = random.integer(1, 5), max_rollback = random.integer(0, 7);
    Model model(random.integer(1, 40), page_size, random.integer(1, 6), max_rollback);
    std::map<int, int> drafts;  // tokens that may be taken back
    for (int step = 0; step < 300; ++step) {
      const auto any = [&] {
        auto it = model.tokens.begin();
        std::advance(it, random.integer(0, static_cast<int>(model.tokens.size()) - 1));
        return it->first;
      };
      const int action = random.integer(0, 9);
      if (action == 0 || model.tokens.empty()) {
        const int made = model.allocator.create();
        if (made != PageAllocator::kNone) REQUIRE(model.tokens.emplace(made, std::vector<int>{}).second);
      } else if (action == 1) {
        const int from = any(), made = model.allocator.fork(from);
        if (made != PageAllocator::kNone) {  // otherwise the allocator has committed nothing
          REQUIRE(model.tokens.emplace(made, model.tokens.at(from)).second);
          drafts[from] = drafts[made] = 0;
        }
      } else if (action == 2) {
        const int gone = any();
        model.allocator.destroy(gone);
        model.tokens.erase(gone), drafts.erase(gone);
      } else if (action == 3) {
        const int sequence = any(), count = random.integer(0, drafts[sequence]);
        model.allocator.rollback(sequence, count);
        auto& tokens = model.tokens.at(sequence);
        tokens.resize(tokens.size() - static_cast<std::size_t>(count));
        drafts[sequence] -= count;
      } else if (action == 4) {
        const int sequence = any();
        model.allocator.commit(sequence);
        drafts[sequence] = 0;
      } else {
        std::vector<Growth> batch;
        for (const auto& entry : model.tokens)
          if (random.integer(0, 2)) batch.push_back({entry.first, random.integer(0, 2 * page_size)});
        if (model.grow(batch))
          for (const Growth& g : batch) drafts[g.sequence] = std::min(drafts[g.sequence] + g.tokens, max_rollback);
      }
      for (const auto& [sequence, tokens] : model.tokens)
        REQUIRE(model.allocator.uncommitted(sequence) == drafts[sequence]);
      model.check();
    }
  }
}

TEST_CASE("A batch gets all its pages or none", "[runtime]") {
  Model model(3, 4, 3, 0);
  const int a = model.allocator.create(), b = model.allocator.create();
  model.tokens[a], model.tokens[b];
  CHECK_FALSE(model.grow({{a, 8}, {b, 5}}));
  model.check();
  CHECK(model.allocator.free_pages() == 3);
  CHECK(model.grow({{a, 8}, {b, 4}}));
  CHECK(model.allocator.free_pages() == 0);
  CHECK_FALSE(model.grow({{b, 1}}));
  model.check();
}

TEST_CASE("A partly full page of two sequences is copied once, by the first that goes on", "[runtime]") {
  PageAllocator allocator(4, 4, 2, 0);
  const int a = allocator.create();
  std::vector<PageCopy> copies;
  REQUIRE(allocator.grow(std::vector<Growth>{{a, 6}}, copies));
  const int b = allocator.fork(a);
  CHECK(allocator.free_pages() == 2);
  REQUIRE(allocator.grow(std::vector<Growth>{{a, 1}, {b, 1}}, copies));
  CHECK(copies.size() == 1);
  CHECK(allocator.pages(a)[0] == allocator.pages(b)[0]);
  CHECK(allocator.pages(a)[1] != allocator.pages(b)[1]);
  CHECK(copies[0] == PageCopy{allocator.pages(b)[1], allocator.pages(a)[1]});
  // Full pages are not copied.
  copies.clear();
  allocator.destroy(b);
  REQUIRE(allocator.grow(std::vector<Growth>{{a, 1}}, copies));
  REQUIRE(allocator.fork(a) == b);
  REQUIRE(allocator.grow(std::vector<Growth>{{b, 1}}, copies));
  CHECK(copies.empty());
}

TEST_CASE("What a page allocator is asked for wrongly is refused by name", "[runtime]") {
  PageAllocator allocator(4, 4, 2, 3);
  const int a = allocator.create();
  std::vector<PageCopy> copies;
  CHECK_THAT(error_text([] { PageAllocator(4, 0, 1, 1); }), Contains("pages of 0 tokens"));
  CHECK_THAT(error_text([&] { allocator.length(1); }), Contains("no sequence 1"));
  CHECK_THAT(error_text([&] { allocator.destroy(7); }), Contains("no sequence 7"));
  CHECK_THAT(error_text([&] { (void)allocator.grow(std::vector<Growth>{{a, 1}, {a, 1}}, copies); }), Contains("twice"));
  CHECK_THAT(error_text([&] { (void)allocator.grow(std::vector<Growth>{{a, -1}}, copies); }), Contains("-1 more"));
  REQUIRE(allocator.grow(std::vector<Growth>{{a, 3}}, copies));
  CHECK_THAT(error_text([&] { allocator.rollback(a, 4); }), Contains("at most 3 tokens, found 4"));
  REQUIRE(allocator.grow(std::vector<Growth>{{a, 1}}, copies));
  CHECK_THAT(error_text([&] { allocator.rollback(a, 4); }), Contains("at most 3 tokens, found 4"));
  allocator.commit(a);
  CHECK_THAT(error_text([&] { allocator.rollback(a, 1); }), Contains("at most 0 tokens, found 1"));
}
