#pragma once

#include <kvq/runtime/kernels/common/write_side.h>
#include <kvq/runtime/kernels/common/page_tiles.cuh>
#include <kvq/runtime/kernels/common/quantize/encode_rotated.cuh>
#include <kvq/runtime/kernels/common/quantize/exact.cuh>
#include <kvq/runtime/kernels/common/quantize/store.cuh>

/// From rotated rows to rows that are stored in pages.
namespace kvq::write {

/// Quantizes one warp's rows and stores them in pages.
/// @param slots    lane i has page * page_size + slot of token i, i = 0..15; negative: not stored
/// @param tile_of  slot -> first byte of the slot's tile
template <typename Side, typename TileOf>
__device__ __forceinline__ void quantize_rows(Rows<Side>& rows, const WriteSide& from, std::int64_t slots,
                                              TileOf tile_of, bool value, int lane) {
  if constexpr (Side::kExact) {
    std::int64_t slot[2];
    of_own_tokens(slots, lane, slot);
    store_exact<Side>(rows, slot, tile_of, false, lane);
  } else {
    unsigned words[2][Side::kWords] = {}, group_params[2][Side::kGroups] = {};
    encode_rows<Side>(rows, from.rule, words, group_params);
    store_codes<Side>(words, group_params, slots, tile_of, value, lane);
  }
}

}  // namespace kvq::write
