#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace kvq {

/// Limits kvq to `threads` threads (0 = all cores) until it is destroyed. Results never depend on the number of
/// threads: work is cut at fixed borders and partial sums are added in index order.
class ThreadLimit {
 public:
  explicit ThreadLimit(int threads);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Runs body(i) for i in [0, count), in any order, on the allowed threads. The first exception is rethrown.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body);

/// parallel_for() for callers that hold a lock: a thread that waits for others takes up no other work meanwhile, which
/// might want the same lock.
void isolated_parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body);

/// Runs compute(i) for i in [0, count) side by side, and take(i) in the order of i, one at a time, on any thread. From
/// the begin of compute(i) to the end of take(i) are at most `at_once` indices. An exception is that of a loop without
/// threads: of the lowest index, after take() of all lower ones; running calls of compute() end before it is rethrown.
void ordered_parallel_for(std::int64_t count, int at_once, const std::function<void(std::int64_t)>& compute,
                          const std::function<void(std::int64_t)>& take);

}  // namespace kvq
