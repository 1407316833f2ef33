#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/encode_rotated.cuh>
#include <kvq/runtime/kernels/quantize_write/store.cuh>

/// From rotated rows to stored ones.
namespace kvq::write {

/// Quantises and stores one warp's rows.
template <typename Side>
__device__ __forceinline__ void code_rows(const WriteParams& p, const WriteSide& from, Rows<Side>& rows, bool value,
                                          int first_token, int head, int head_bytes, int side_offset, int lane) {
  constexpr TileSide kSide{Side::kHeadDim, Side::kBits, Side::kGroup, Side::kNumbers};
  const int g = lane >> 2;
  unsigned words[2][Side::kWords] = {}, numbers[2][Side::kGroups] = {};
  encode_rows<Side>(rows, from.rule, words, numbers);
  std::int64_t slot[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    slot[r] = first_token + g + 8 * r < p.num_tokens ? p.slot_mapping[first_token + g + 8 * r] : -1;
  const std::int64_t page_mask = (std::int64_t{1} << p.page_shift) - 1;
  const auto tile_of = [&](std::int64_t at) {
    return p.pages + (at >> p.page_shift) * p.page_stride + head * head_bytes + side_offset +
           static_cast<int>(at & page_mask) / kTileTokens * kSide.bytes();
  };
  store_codes<Side>(words, numbers, slot, tile_of, value, lane);
}

}  // namespace kvq::write
