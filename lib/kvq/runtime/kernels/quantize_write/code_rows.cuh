#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/encode.cuh>
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
