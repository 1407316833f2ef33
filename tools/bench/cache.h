#pragma once

#include "bench/cases.h"
#include "bench/device.h"
#include "bench/reference.h"

#include <vector>

namespace kvq::bench {

/// A KV cache on the device with random contents; sequences own pages and window slots in random order.
class Cache {
 public:
  Cache(const Device& device, const CacheShape& shape, unsigned seed);

  /// Fills the view of the cache that a call gets, but for batch, num_kv_heads and what belongs to rotations.
  void enter(PagedCacheView& p) const {
    p.pages = pages_, p.page_stride = shape_.pages().page_bytes(), p.page_shift = page_shift(shape_.page_size);
    p.page_table = table_on_device_, p.page_table_stride = shape_.num_pages();
    p.windows = windows_, p.window_slots = slots_on_device_, p.window_layout = shape_.windows();
    p.sink_tokens = shape_.sink_tokens, p.recent_tokens = shape_.recent_tokens;
    p.seq_lens = lengths_on_device_;
  }
  /// Launches a kernel that only reads: as many bytes as attention reads from this cache.
  void read(const Device& device, unsigned* sink) const;
  /// Copies the pages and the window slot of one sequence to the host.
  HostSequence sequence(int index) const;

 private:
  Memory memory_;
  CacheShape shape_;
  std::vector<int> table_, slots_;
  std::byte *pages_ = nullptr, *windows_ = nullptr;
  int *table_on_device_ = nullptr, *slots_on_device_ = nullptr, *lengths_on_device_ = nullptr;
};

}  // namespace kvq::bench
