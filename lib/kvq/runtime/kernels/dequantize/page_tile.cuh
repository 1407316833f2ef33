#pragma once

#include <kvq/runtime/kernels/common/sequences.cuh>

namespace kvq::dequantize {

/// The coded tile of the tokens first .. first + 15 of a sequence, or null if its page is not in the pool.
__device__ __forceinline__ const std::byte* page_tile(const PagedCacheView& cache, const PageLayout& layout,
                                                      int sequence, int head, bool value, int first) {
  const std::int32_t* table = table_of(cache, sequence);
  const int page = page_of(cache, table, first);
  if (page < 0) {
    record_fault(cache.faults, {FaultCode::page, table[first >> cache.page_shift]}, sequence, cache.layer);
    return nullptr;
  }
  const int slot = first & (layout.page_size - 1);
  return cache.pages + page * cache.page_stride + (value ? layout.value_tile(head, slot) : layout.key_tile(head, slot));
}

}  // namespace kvq::dequantize
