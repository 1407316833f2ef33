#pragma once

#include <cstddef>
#include <vector>

struct CUstream_st;

/// A kernel that lets its dependents start at once, and writes what they read at its very end.
namespace kvq::test {

struct LateWrite {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// Enqueues the kernel. @param writes  8 at most
void run_slow_writer(const std::vector<LateWrite>& writes, CUstream_st* stream);

}  // namespace kvq::test
