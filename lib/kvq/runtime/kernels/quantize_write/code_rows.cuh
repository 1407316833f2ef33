#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/common/quantize/quantize_rows.cuh>

/// From rotated rows to stored rows.
namespace kvq::write {

/// Destinations of the warp's tokens from a mapping: lane i gets that of token i, i = 0..15; negative: not stored. Load
/// them early to hide the latency.
__device__ __forceinline__ std::int64_t load_mapping(const WriteParams& p, const std::int64_t* mapping, int first_token,
                                                     int lane) {
  const int token = first_token + lane;
  return lane < kTileTokens && token < p.num_tokens ? __ldg(mapping + token) : -1;
}

/// Stores one warp's rows where their tokens are mapped to: as bfloat16 in the windows, quantized in the pages.
/// @param slots  load_mapping() of the slot mapping
template <typename Side>
__device__ __forceinline__ void store_rows(const WriteParams& p, const WriteSide& from, Rows<Side>& rows, bool value,
                                           std::int64_t slots, int first_token, int head, int head_bytes,
                                           int side_offset, int lane) {
  if (p.window_mapping) {
    const std::int64_t window_rows = load_mapping(p, p.window_mapping, first_token, lane);
    std::int64_t row[2];
    of_own_tokens(window_rows, lane, row);
    const auto tile_of = [&](std::int64_t at) {
      return p.windows + p.window_layout.tile_pair(at, head) + (value ? p.window_layout.k.bytes() : 0);
    };
    store_exact<Side>(rows, row, tile_of, value, lane);
    if (!__any_sync(kAll, slots >= 0)) return;  // the common case in decode steps
  }
  const PageTiles tile_of{p.pages, static_cast<unsigned>(p.page_stride), p.page_shift, head * head_bytes + side_offset,
                          Side::side().bytes()};
  quantize_rows<Side>(rows, from, slots, tile_of, value, lane);
}

}  // namespace kvq::write
