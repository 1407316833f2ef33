#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/rotation.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/sequences.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// Read-only view of one layer's paged cache: coded pages, exact windows, and how its rows are rotated.
struct PagedCacheView : SequenceTables {
  int num_kv_heads = 0;

  // which tokens are exact, and how far numbers of pages and slots may go
  WindowRule windows = {};
  CacheExtents extents = {};

  // coded pages
  const std::byte* pages = nullptr;  ///< 16-byte aligned
  int page_shift = 6;                ///< log2 of page_size
  std::int64_t page_stride = 0;      ///< bytes from page to page, at least PageLayout::page_bytes()

  // exact windows (not the sliding window of queries)
  const std::byte* sinks = nullptr;  ///< 16-byte aligned, or null without sink tokens
  const std::byte* rings = nullptr;  ///< 16-byte aligned, or null without recent tokens
  WindowLayout sink_layout = {}, ring_layout = {};

  // faults of the caller's tables
  const RingState* ring_states = nullptr;  ///< [num_ring_slots], or null: not checked
  FaultRecord* faults = nullptr;           ///< null: not recorded
  int layer = -1;                          ///< of the whole model, for the record

  // x = x_rot A^-1 + center. Without order, matrix and center, x is x_rot; that of values, if their rotation is folded
  // into the weights.
  DeviceRotation rotation_k = {};   ///< matrix as queries are multiplied by it: x = x_rot @ matrix^T + center
  DeviceRotation rotation_v = {};   ///< x = x_rot @ matrix + center
  const float* center_k = nullptr;  ///< [Hkv, D] or null
  const float* center_v = nullptr;  ///< [Hkv, D] or null

  RowCode code_k = {}, code_v = {};  ///< for generic kernels; of codebook codes and centroids for tuned ones, too
};

}  // namespace kvq
