#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/common/fault.cuh>
#include <kvq/runtime/kernels/common/quantize/codebook.cuh>
#include <kvq/runtime/kernels/common/quantize/quantize_rows.cuh>
#include <kvq/runtime/kernels/common/quantize/segments.cuh>
#include <kvq/runtime/kernels/quantize_write/pair_gains.cuh>

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

/// Where the warp's tokens go: lane i has that of token i, i = 0..15; negative: nowhere. They are not checked yet,
/// because a check waits for the loads.
struct Destinations {
  std::int64_t slot, window_row;
};
/// Load them early to hide the latency.
/// @param part  number of the warp among the WriteParams::row_parts that divide the 16 tokens: the tokens of the other
///              warps go nowhere
template <typename Side>
__device__ __forceinline__ Destinations load_destinations(const WriteParams& p, int first_token, int part, int lane) {
  const int token = first_token + lane;
  if (lane >= kTileTokens || token >= p.num_tokens) return {-1, -1};
  if (HasSegments<Side> && (lane & (p.row_parts - 1)) != part) return {-1, -1};
  return {__ldcg(p.slot_mapping + token), p.window_mapping ? __ldcg(p.window_mapping + token) : -1};
}

/// The warp's rows in the windows that its tokens are mapped to, as bfloat16.
template <typename Side>
__device__ __forceinline__ void store_window_rows(const WriteParams& p, Rows<Side>& rows, bool value, Destinations to,
                                                  int head, int lane) {
  std::int64_t row[2];
  of_own_tokens(checked_window_row(p, to.window_row), lane, row);
  const auto tile_of = [&](std::int64_t at) {
    return window_tiles(p, at, head) + (value ? p.ring_layout.k.bytes() : 0);
  };
  store_exact<Side>(rows, row, tile_of, value, lane);
}

/// Whether quantizing a side's rows needs shared memory of the warp, and for how many bytes.
template <typename Side>
constexpr int kScratchBytes = 0;
template <IsCodebook Side>
constexpr int kScratchBytes<Side> = sizeof(CodebookScratch<Side>);
template <HasSegments Side>
constexpr int kScratchBytes<Side> = sizeof(SegmentScratch<Side::kHeadDim, Side::kRows>);

/// What a warp or block keeps of its head in shared memory.
struct NoTables {
  __device__ __forceinline__ void load(const RowCode&, int, int) {}
};
template <typename Side>
struct TablesOfSide {
  using Type = NoTables;
};
template <IsCodebook Side>
struct TablesOfSide<Side> {
  using Type = CodebookTables<Side::kBits>;
};
template <typename Side>
using SideTables = typename TablesOfSide<Side>::Type;

template <typename Side>
__device__ __forceinline__ PageTiles page_tiles(const WriteParams& p, int head, int head_bytes, int side_offset) {
  return {p.pages, static_cast<unsigned>(p.page_stride), p.page_shift, head * head_bytes + side_offset,
          HasSegments<Side> ? p.k_tile_bytes : Side::side().bytes()};
}

/// Stores one warp's rows where their tokens are mapped to: as bfloat16 in the windows, quantized in the pages. Of rows
/// of trellis codes, stores what their search needs in place of codes.
/// @param tables   of the head
/// @param scratch  kScratchBytes, aligned to 16 bytes; what lanes read there before may be overwritten
template <typename Side>
__device__ __forceinline__ void store_rows(const WriteParams& p, const WriteSide& from, Rows<Side>& rows, bool value,
                                           Destinations to, int head, int head_bytes, int side_offset, int first_token,
                                           const SideTables<Side>& tables, std::byte* scratch, int lane) {
  if (__any_sync(kAll, to.window_row >= 0)) store_window_rows<Side>(p, rows, value, to, head, lane);
  if constexpr (IsTrellis<Side>) {
    store_gains<Side>(p, from, rows, value, head, first_token, lane);
  } else {
    const PageTiles tile_of = page_tiles<Side>(p, head, head_bytes, side_offset);
    const std::int64_t slots = checked_slot(p, to.slot);
    if constexpr (IsCodebook<Side>)
      quantize_codebook_rows<Side>(rows, tables, from.rule, slots, tile_of, value, scratch, lane);
    else if constexpr (HasSegments<Side>)
      quantize_segment_rows<Side>(rows, from.code, from.rule, head, p.k_segments, slots, tile_of, scratch, lane);
    else
      quantize_rows<Side>(rows, from, slots, tile_of, value, lane);
  }
}

}  // namespace kvq::write
