#include "bench/copies.h"

#include "bench/kernels.h"

namespace kvq::bench {

Timing time_copy(const Device& device, int calls, std::int64_t bytes, const std::function<CopyEnds(int)>& ends) {
  bytes = bytes / 16 * 16;
  const Timing library = device.time(calls, [&](int i) {
    const CopyEnds e = ends(i);
    copy_async(device, e.to, e.from, static_cast<std::size_t>(bytes));
  });
  const Timing kernel = device.time(calls, [&](int i) {
    const CopyEnds e = ends(i);
    check(copy_bytes(device.stream(), device.machine().multiprocessors, e.to, e.from, bytes));
  });
  return library.median_us < kernel.median_us ? library : kernel;
}

double copy_bandwidth(const Device& device) {
  constexpr std::int64_t kBytes = 1 << 28;
  Memory memory;
  std::byte *a = memory.take<std::byte>(kBytes), *b = memory.take<std::byte>(kBytes);
  check(fill_rows(device.stream(), a, kBytes / 2, true, 1));
  check(fill_rows(device.stream(), b, kBytes / 2, true, 2));
  const Timing timing = time_copy(device, 8, kBytes, [&](int i) { return i % 2 ? CopyEnds{a, b} : CopyEnds{b, a}; });
  return 2.0 * static_cast<double>(kBytes) / (timing.median_us * 1e-6);
}

}  // namespace kvq::bench
