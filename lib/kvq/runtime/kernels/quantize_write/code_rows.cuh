#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/encode_rotated.cuh>
#include <kvq/runtime/kernels/quantize_write/exact.cuh>
#include <kvq/runtime/kernels/quantize_write/store.cuh>

/// From rotated rows to stored ones.
namespace kvq::write {

/// Quantises one warp's rows and stores them in pages.
/// @param slot_of  page * page_size + slot of the token g + 8 r; negative: nowhere. Asked at last, since registers are
///                 scarce before
/// @param tile_of  first byte of the tile that holds a slot
template <typename Side, typename SlotOf, typename TileOf>
__device__ __forceinline__ void quantise_rows(Rows<Side>& rows, const WriteSide& from, SlotOf slot_of, TileOf tile_of,
                                              bool value, int lane) {
  if constexpr (Side::kExact) {
    const std::int64_t slot[2] = {slot_of(0), slot_of(1)};
    store_exact<Side>(rows, slot, tile_of, false, lane);
  } else {
    unsigned words[2][Side::kWords] = {}, numbers[2][Side::kGroups] = {};
    encode_rows<Side>(rows, from.rule, words, numbers);
    const std::int64_t slot[2] = {slot_of(0), slot_of(1)};
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
  const auto mapped = [&](const std::int64_t* mapping, int r) {
    const int token = first_token + (lane >> 2) + 8 * r;
    return token < p.num_tokens ? mapping[token] : -1;
  };
  if (p.window_mapping) {
    const std::int64_t row[2] = {mapped(p.window_mapping, 0), mapped(p.window_mapping, 1)};
    const bool coded = mapped(p.slot_mapping, 0) >= 0 || mapped(p.slot_mapping, 1) >= 0;
    const auto tile_of = [&](std::int64_t at) {
      return p.windows + p.window_layout.tile_pair(at, head) + (value ? p.window_layout.k.bytes() : 0);
    };
    store_exact<Side>(rows, row, tile_of, value, lane);
    if (!__any_sync(kAll, coded)) return;  // most steps of decoding code nothing
  }
  const PageTiles tile_of{p.pages, p.page_stride, p.page_shift, head * head_bytes + side_offset, Side::side().bytes()};
  quantise_rows<Side>(rows, from, [&](int r) { return mapped(p.slot_mapping, r); }, tile_of, value, lane);
}

}  // namespace kvq::write
