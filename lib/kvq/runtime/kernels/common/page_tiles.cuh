#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/device/ptx.cuh>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// Maps page * page_size + slot to the first byte of the slot's tile, for one head and side.
struct PageTiles {
  std::byte* pages;
  unsigned page_stride;
  int page_shift, offset, tile_bytes;
  __device__ __forceinline__ std::byte* operator()(std::int64_t slot) const {
    const int in_page = static_cast<int>(slot) & ((1 << page_shift) - 1);
    return pages + ptx::mul_wide(static_cast<unsigned>(slot >> page_shift), page_stride) + offset +
           in_page / kTileTokens * tile_bytes;
  }
};

}  // namespace kvq
