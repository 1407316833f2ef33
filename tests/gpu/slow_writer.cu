#include "slow_writer.h"

#include "device_memory.h"

#include <kvq/device/ptx.cuh>

#include <algorithm>

namespace kvq::test {

namespace {

constexpr int kMostWrites = 16, kRounds = 60;

struct LateWrites {
  LateWrite all[kMostWrites];
  int count = 0;
};

__global__ void slow_writer(const __grid_constant__ LateWrites late) {
  ptx::griddepcontrol_launch_dependents();
  for (int i = 0; i < kRounds; ++i) __nanosleep(1000);
  for (int i = 0; i < late.count; ++i)
    for (std::size_t at = threadIdx.x; at < late.all[i].bytes; at += blockDim.x)
      static_cast<std::byte*>(late.all[i].to)[at] = static_cast<const std::byte*>(late.all[i].from)[at];
}

}  // namespace

void run_slow_writer(const std::vector<LateWrite>& writes, CUstream_st* stream) {
  LateWrites late;
  if (writes.size() > kMostWrites) throw std::runtime_error("slow_writer: too many writes");
  std::copy(writes.begin(), writes.end(), late.all);
  late.count = static_cast<int>(writes.size());
  check(launch_kernel(slow_writer, dim3(1), 256, 0, false, stream, late), "slow_writer");
}

}  // namespace kvq::test
