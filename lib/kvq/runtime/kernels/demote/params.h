#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/write_side.h>

namespace kvq {

/// One layer's windows and pages, and the format of its rows.
struct DemoteLayer {
  const std::byte* windows = nullptr;  ///< 16-byte aligned
  std::byte* pages = nullptr;          ///< 16-byte aligned
  WriteSide k, v;                      ///< as for writing; only the fields for quantizing rotated rows are read
};

/// One call that quantizes the tokens that leave the recent window (demotions), for all layers of the same format. It
/// runs before the step's new tokens are written, because these may overwrite the same rows of the ring.
struct DemoteParams {
  int num_layers = 0, num_kv_heads = 0;
  const DemoteLayer* layers = nullptr;          ///< [L], on the device
  int max_demotions = 0;                        ///< M
  const std::int32_t* num_demotions = nullptr;  ///< [1] number of demotions; read on the device
  const std::int64_t* demote_from = nullptr;    ///< [M] slot * rows() + row() in the windows
  const std::int64_t* demote_to = nullptr;      ///< [M] page * page_size + slot
  WindowLayout window_layout = {};
  int page_shift = 6;            ///< log2 of page_size: 4, 5 or 6
  std::int64_t page_stride = 0;  ///< bytes from page to page
};

}  // namespace kvq
