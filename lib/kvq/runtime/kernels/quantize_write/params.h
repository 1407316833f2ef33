#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/write_side.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// One call that rotates tokens, quantizes them and writes them into pages, and writes exact tokens into windows.
struct WriteParams {
  int num_tokens = 0, num_kv_heads = 0;
  WriteSide k, v;
  const std::int64_t* slot_mapping = nullptr;  ///< [T] page * page_size + slot of each token; negative: not quantized
  std::byte* pages = nullptr;                  ///< 16-byte aligned
  int page_shift = 6;                          ///< log2 of page_size: 4, 5 or 6
  std::int64_t page_stride = 0;                ///< bytes from page to page

  const std::int64_t* window_mapping = nullptr;  ///< [T] slot * rows() + row() of each token in the windows, negative:
                                                 ///< not exact; or null without windows
  std::byte* windows = nullptr;                  ///< 16-byte aligned
  WindowLayout window_layout = {};
};

}  // namespace kvq
