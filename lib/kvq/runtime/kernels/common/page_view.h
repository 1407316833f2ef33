#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/rotation.h>
#include <kvq/runtime/kernels/common/tiers.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// Read-only view of one layer's paged cache: coded pages, exact windows, and how its rows are rotated.
struct PagedCacheView {
  int batch = 0, num_kv_heads = 0;

  // which tokens; position and length alone decide whether a token is exact or coded
  const std::int32_t* seq_lens = nullptr;  ///< [B] tokens of each sequence in the cache
  int sink_tokens = 0, recent_tokens = 0;  ///< exact (bfloat16) tokens at the two ends of a sequence

  // coded pages
  const std::byte* pages = nullptr;           ///< 16-byte aligned
  const std::int32_t* page_table = nullptr;   ///< [B, max_pages], or one list if page_indptr is given
  const std::int32_t* page_indptr = nullptr;  ///< [B + 1] or null
  std::int64_t page_table_stride = 0;
  int page_shift = 6;            ///< log2 of page_size
  std::int64_t page_stride = 0;  ///< bytes from page to page, at least PageLayout::page_bytes()

  // exact windows: the sinks and recent tokens of each sequence (not the sliding window of queries)
  const std::byte* windows = nullptr;          ///< 16-byte aligned, or null without windows
  const std::int32_t* window_slots = nullptr;  ///< [B] window slot of each sequence
  WindowLayout window_layout = {};

  // x = x_rot A^-1 + center. Without order, matrix and center, x is x_rot; that of values, if their rotation is folded
  // into the weights.
  DeviceRotation rotation_k = {};   ///< matrix as queries are multiplied by it: x = x_rot @ matrix^T + center
  DeviceRotation rotation_v = {};   ///< x = x_rot @ matrix + center
  const float* center_k = nullptr;  ///< [Hkv, D] or null
  const float* center_v = nullptr;  ///< [Hkv, D] or null

  KVQ_HD constexpr Tiers tiers() const { return {sink_tokens, recent_tokens}; }
};

}  // namespace kvq
