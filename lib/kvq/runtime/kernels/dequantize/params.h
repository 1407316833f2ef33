#pragma once

#include <kvq/runtime/kernels/common/page_view.h>

#include <cstdint>

namespace kvq {

/// One call that writes rows of the cache as 16-bit numbers. Strides are in elements.
struct DequantizeParams {
  PagedCacheView cache = {};
  const std::int32_t* first = nullptr;       ///< [B] position of the first token that is written, or null: 0
  const std::int32_t* last = nullptr;        ///< [B] position behind the last token, or null: all
  const std::int32_t* out_indptr = nullptr;  ///< [B + 1] ascending: rows of each sequence
  int num_rows = 0;                          ///< of k and v
  void* k = nullptr;                         ///< [T, Hkv, D] 16-byte aligned; heads are D apart
  void* v = nullptr;
  std::int64_t k_stride = 0, v_stride = 0;  ///< from token to token, multiples of 8
};

}  // namespace kvq
