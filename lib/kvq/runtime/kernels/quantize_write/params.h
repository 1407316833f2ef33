#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/sequences.h>
#include <kvq/runtime/kernels/common/write_side.h>
#include <kvq/runtime/kernels/quantize_write/pair_rows.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// One call that rotates tokens, quantizes them and writes them into pages, and writes exact rows into windows.
struct WriteParams {
  int num_tokens = 0, num_kv_heads = 0;
  WriteSide k, v;
  const std::int64_t* slot_mapping = nullptr;  ///< [T] page * page_size + slot of each token; negative: not written
  std::byte* pages = nullptr;                  ///< 16-byte aligned
  int page_shift = 6;                          ///< log2 of page_size
  std::int64_t page_stride = 0;                ///< bytes from page to page
  int k_tile_bytes = 0, v_tile_bytes = 0;      ///< of both sides, for kernels that write one of them
  TileSide k_segments = {};                    ///< tiles of keys of mixed widths, for their kernel
  int row_parts = 1;                           ///< warps of that kernel that divide 16 tokens: 1, 2, 4 or 8

  const std::int64_t* window_mapping = nullptr;  ///< [T] row in the windows (ring_state.h); or null without windows
  std::byte* sinks = nullptr;                    ///< 16-byte aligned, or null without sink tokens
  std::byte* rings = nullptr;                    ///< 16-byte aligned, or null without recent tokens
  WindowLayout sink_layout = {}, ring_layout = {};

  std::byte* workspace = nullptr;  ///< aligned to 256 bytes, or null: trellis codes are searched row by row
  std::size_t workspace_bytes = 0;
  PairRows pairs = {};  ///< rows in the workspace; set by the kernels' launch

  /// The stream's next kernel starts only when the kernels before this one have ended (DecodeParams::inputs_final).
  bool holds_next = false;

  CacheExtents extents = {};
  FaultRecord* faults = nullptr;  ///< null: not recorded
  int layer = -1;                 ///< of the whole model, for the record
};

}  // namespace kvq
