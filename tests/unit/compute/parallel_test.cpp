#include <kvq/compute/parallel.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace kvq;

TEST_CASE("Every index is visited once, whatever the number of threads", "[compute]") {
  for (const int threads : {0, 1, 2, 5})
    for (const std::int64_t count : {0, 1, 2, 31, 1000}) {
      const ThreadLimit limit(threads);
      std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
      parallel_for(count, [&](std::int64_t i) { ++visits[static_cast<std::size_t>(i)]; });
      CHECK(std::all_of(visits.begin(), visits.end(), [](const auto& n) { return n == 1; }));
    }
}

TEST_CASE("No more threads work than the limit allows, and the limit ends with its scope", "[compute]") {
  const auto most_at_once = [] {
    std::atomic<int> now = 0, most = 0;
    parallel_for(64, [&](std::int64_t) {
      const int here = ++now;
      for (int seen = most; here > seen && !most.compare_exchange_weak(seen, here);) {
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      --now;
    });
    return most.load();
  };
  {
    const ThreadLimit one(1);
    CHECK(most_at_once() == 1);
  }
  {
    const ThreadLimit two(2);
    CHECK(most_at_once() <= 2);
  }
}

TEST_CASE("An exception inside the loop reaches the caller", "[compute]") {
  for (const int threads : {1, 2}) {
    const ThreadLimit limit(threads);
    CHECK_THROWS_AS(parallel_for(100,
                                 [](std::int64_t i) {
                                   if (i == 57) throw std::runtime_error("57");
                                 }),
                    std::runtime_error);
  }
}

TEST_CASE("Results are taken in order, and few indices are in work at a time", "[compute]") {
  for (const int threads : {1, 2, 5})
    for (const int at_once : {1, 3, 8}) {
      const ThreadLimit limit(threads);
      std::atomic<int> now = 0, most = 0;
      std::vector<std::int64_t> taken;
      ordered_parallel_for(
          23, at_once,
          [&](std::int64_t i) {
            const int here = ++now;
            for (int seen = most; here > seen && !most.compare_exchange_weak(seen, here);) {
            }
            if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            parallel_for(3, [](std::int64_t) {});
          },
          [&](std::int64_t i) {
            taken.push_back(i);
            --now;
          });
      REQUIRE(taken.size() == 23);
      CHECK(std::is_sorted(taken.begin(), taken.end()));
      CHECK(most <= at_once);
    }
}

TEST_CASE("Of several exceptions that of the lowest index reaches the caller, after all lower ones are taken",
          "[compute]") {
  for (const int threads : {1, 5})
    for (const int at_once : {1, 4}) {
      const ThreadLimit limit(threads);
      std::vector<std::int64_t> taken;
      std::atomic<int> running = 0;
      const auto compute = [&](std::int64_t i) {
        ++running;
        if (i == 5) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        --running;
        if (i >= 5) throw std::runtime_error(std::to_string(i));
      };
      CHECK_THROWS_WITH(ordered_parallel_for(40, at_once, compute, [&](std::int64_t i) { taken.push_back(i); }), "5");
      CHECK(taken == std::vector<std::int64_t>{0, 1, 2, 3, 4});
      CHECK(running == 0);
      const auto refuse = [&](std::int64_t i) {
        if (i == 3) throw std::runtime_error("taken");
      };
      CHECK_THROWS_WITH(ordered_parallel_for(40, at_once, [](std::int64_t) {}, refuse), "taken");
    }
}
