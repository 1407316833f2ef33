#pragma once

#include "bench/cases.h"
#include "bench/device.h"
#include "bench/reference.h"

#include <kvq/runtime/kernels/quantize_write/params.h>

#include <vector>

namespace kvq::bench {

/// A KV cache on the device with random contents; sequences own pages and slots in random order.
class Cache {
 public:
  Cache(const Device& device, const CacheShape& shape, unsigned seed);

  /// Fills the view of the cache that a call gets, but for the fault record and what belongs to rotations.
  /// @param checked  kernels check numbers of pages and slots, and owners of rings
  void enter(PagedCacheView& p, bool checked = true) const;
  /// Fills what a write of the new tokens gets of the cache, but for the fault record.
  void enter(WriteParams& p) const;
  /// Launches a kernel that only reads: as many bytes as attention reads from this cache.
  void read(const Device& device, unsigned* sink) const;
  /// Copies the pages and the slots of one sequence to the host.
  HostSequence sequence(int index) const;

 private:
  Memory memory_;
  CacheShape shape_;
  std::vector<int> table_, sink_slots_, ring_slots_;
  std::byte *pages_ = nullptr, *windows_ = nullptr;  ///< windows_: sinks, then rings
  std::int64_t sink_bytes_ = 0;                      ///< of the pool
  RingState* ring_states_ = nullptr;
  SequenceTables tables_ = {};
  std::int64_t *slots_ = nullptr, *window_rows_ = nullptr;  ///< [batch, new_tokens]
};

}  // namespace kvq::bench
