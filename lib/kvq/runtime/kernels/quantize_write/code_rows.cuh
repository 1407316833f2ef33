#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/encode.cuh>
#include <kvq/runtime/kernels/quantize_write/exact.cuh>
#include <kvq/runtime/kernels/quantize_write/store.cuh>

/// From rotated rows to stored ones.
namespace kvq::write {

/// Quantises one warp's rows and stores them in pages.
/// @param slot     page * page_size + slot of the tokens g and g + 8; negative: nowhere
/// @param tile_of  first byte of the tile that holds a slot
template <typename Side, typename TileOf>
__device__ __forceinline__ void quantise_rows(Rows<Side>& rows, const WriteSide& from, const std::int64_t (&slot)[2],
                                              TileOf tile_of, bool value, int lane) {
  if constexpr (Side::kExact) {
    store_exact<Side>(rows, slot, tile_of, false, lane);
  } else {
    unsigned words[2][Side::kWords] = {}, numbers[2][Side::kGroups] = {};
    // Twice the same code rather than twice as much of it: a task is one pass through it, and it must come from the
    // cache.
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < Side::kWords; ++i) words[0][i] = words[1][i];
#pragma unroll
      for (int i = 0; i < Side::kGroups; ++i) numbers[0][i] = numbers[1][i];
      encode<Side>(rows.x[0], from.rule, words[1], numbers[1]);
#pragma unroll
      for (int j = 0; j < Rows<Side>::kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) rows.x[0][j][e] = rows.x[1][j][e];
    }
    store_codes<Side>(words, numbers, slot, tile_of, value, lane);
  }
}

/// First byte of the tile of one head and side that holds a slot of the pages.
struct PageTiles {
  std::byte* pages;
  std::int64_t page_stride;
  int page_shift, offset, tile_bytes;
  __device__ __forceinline__ std::byte* operator()(std::int64_t slot) const {
    const int in_page = static_cast<int>(slot) & ((1 << page_shift) - 1);
    return pages + (slot >> page_shift) * page_stride + offset + in_page / kTileTokens * tile_bytes;
  }
};

/// Stores one warp's rows: exactly in the windows, in codes in the pages, wherever their tokens are mapped.
template <typename Side>
__device__ __forceinline__ void code_rows(const WriteParams& p, const WriteSide& from, Rows<Side>& rows, bool value,
                                          int first_token, int head, int head_bytes, int side_offset, int lane) {
  const int g = lane >> 2;
  std::int64_t slot[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = first_token + g + 8 * r;
    slot[r] = token < p.num_tokens ? p.slot_mapping[token] : -1;
  }
  if (p.window_mapping) {
    std::int64_t row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = first_token + g + 8 * r;
      row[r] = token < p.num_tokens ? p.window_mapping[token] : -1;
    }
    const auto tile_of = [&](std::int64_t at) {
      return p.windows + p.window_layout.tile_pair(at, head) + (value ? p.window_layout.k.bytes() : 0);
    };
    store_exact<Side>(rows, row, tile_of, value, lane);
    if (!__any_sync(kAll, slot[0] >= 0 || slot[1] >= 0)) return;  // most steps of decoding code nothing
  }
  quantise_rows<Side>(
      rows, from, slot,
      PageTiles{p.pages, p.page_stride, p.page_shift, head * head_bytes + side_offset, Side::side().bytes()}, value,
      lane);
}

}  // namespace kvq::write
