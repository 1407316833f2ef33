#pragma once

#include "bench/device.h"

#include <cstdint>
#include <functional>

namespace kvq::bench {

/// Where call i copies from and to.
struct CopyEnds {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
};

/// Time of a copy of `bytes`, rounded down to 16, on the device: of cudaMemcpyAsync or of a plain kernel, which is
/// faster.
Timing time_copy(const Device& device, int calls, std::int64_t bytes, const std::function<CopyEnds(int)>& ends);

/// Bytes read and written in a second by copies of a quarter of a gigabyte.
double copy_bandwidth(const Device& device);

}  // namespace kvq::bench
