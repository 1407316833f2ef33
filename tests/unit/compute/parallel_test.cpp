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
