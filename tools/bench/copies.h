#pragma once

#include "bench/device.h"

#include <cstdint>
#include <functional>

namespace kvq::bench {

/// Destination and source of copy i.
struct CopyEnds {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
};

/// Time of a device-to-device copy of `bytes`, rounded down to a multiple of 16: the smaller median of cudaMemcpyAsync
/// and a copy kernel.
Timing time_copy(const Device& device, int calls, std::int64_t bytes, const std::function<CopyEnds(int)>& ends);

/// Bytes read and written per second by copies of 256 MiB.
double copy_bandwidth(const Device& device);

}  // namespace kvq::bench
