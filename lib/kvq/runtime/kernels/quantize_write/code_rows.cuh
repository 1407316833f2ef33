#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/common/fault.cuh>
#include <kvq/runtime/kernels/common/quantize/quantize_rows.cuh>

/// From rotated rows to stored rows.
namespace kvq::write {

/// A slot of the mapping, or -1 if it is negative or beyond the pool.
__device__ __forceinline__ std::int64_t checked_slot(const WriteParams& p, std::int64_t slot) {
  if (slot < 0) return -1;
  if (slot >> p.page_shift < p.extents.num_pages) return slot;
  record_fault(p.faults, {FaultCode::slot_mapping, slot}, -1, p.layer);
  return -1;
}
/// A row of the window mapping, or -1 if it is negative or beyond its pool.
__device__ __forceinline__ std::int64_t checked_window_row(const WriteParams& p, std::int64_t row) {
  if (row < 0) return -1;
  const bool is_sink = row >= kSinkRow;
  const std::int64_t rows = is_sink ? std::int64_t{p.extents.num_sink_slots} * p.sink_layout.rows
                                    : std::int64_t{p.extents.num_ring_slots} * p.ring_layout.rows;
  if ((is_sink ? row - kSinkRow : row) < rows) return row;
  record_fault(p.faults, {FaultCode::window_row, row}, -1, p.layer);
  return -1;
}

/// First byte of the K and V tiles of a head that hold a row of the windows.
__device__ __forceinline__ std::byte* window_tiles(const WriteParams& p, std::int64_t row, int head) {
  return row >= kSinkRow ? p.sinks + p.sink_layout.tile_pair(row - kSinkRow, head)
                         : p.rings + p.ring_layout.tile_pair(row, head);
}

/// Destinations of the warp's tokens in pages: lane i gets that of token i, i = 0..15; negative: not stored. Load them
/// early to hide the latency.
__device__ __forceinline__ std::int64_t load_slots(const WriteParams& p, int first_token, int lane) {
  const int token = first_token + lane;
  return lane < kTileTokens && token < p.num_tokens ? checked_slot(p, __ldcg(p.slot_mapping + token)) : -1;
}

/// Stores one warp's rows where their tokens are mapped to: as bfloat16 in the windows, quantized in the pages.
/// @param slots  load_slots()
template <typename Side>
__device__ __forceinline__ void store_rows(const WriteParams& p, const WriteSide& from, Rows<Side>& rows, bool value,
                                           std::int64_t slots, int first_token, int head, int head_bytes,
                                           int side_offset, int lane) {
  if (p.window_mapping) {
    const int token = first_token + lane;
    const std::int64_t mapped =
        lane < kTileTokens && token < p.num_tokens ? checked_window_row(p, __ldcg(p.window_mapping + token)) : -1;
    if (__any_sync(kAll, mapped >= 0)) {
      std::int64_t row[2];
      of_own_tokens(mapped, lane, row);
      const auto tile_of = [&](std::int64_t at) {
        return window_tiles(p, at, head) + (value ? p.ring_layout.k.bytes() : 0);
      };
      store_exact<Side>(rows, row, tile_of, value, lane);
    }
  }
  const PageTiles tile_of{p.pages, static_cast<unsigned>(p.page_stride), p.page_shift, head * head_bytes + side_offset,
                          Side::side().bytes()};
  quantize_rows<Side>(rows, from, slots, tile_of, value, lane);
}

}  // namespace kvq::write
