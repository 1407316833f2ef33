#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/page_layout.h>

#include <string>
#include <vector>

namespace kvq {

/// Major version of formats/pages.md, which changes with the meaning of stored bytes.
constexpr int kPagesMajor = 2;

/// One thing in a side's plan that pages do not hold.
struct PageFault {
  Side side = Side::k;
  std::string what;              ///< "head_dim of exact rows", "values"
  std::string supported, found;  ///< "multiples of 16" and "72"
  /// "head_dim of exact rows: supported multiples of 16, found 72"
  std::string text() const;
  bool operator==(const PageFault&) const = default;
};

/// Everything in a layer's plan that pages do not hold (formats/pages.md, "Parameters, and what fits"); empty: pages
/// hold the layer.
/// @param plan  valid
std::vector<PageFault> page_faults(const LayerPlan& plan);

/// Whether pages may have so many tokens: 16, 32, 64 or 128.
bool is_page_size(int tokens);

/// Layout of the pages for a layer's plan (formats/pages.md, "Parameters, and what fits").
/// @param plan       valid
/// @param page_size  tokens: 16, 32, 64 or 128
/// @throws           Error{unsupported} naming layer, side, what is supported and what was found, all faults at once
PageLayout page_layout_of(const LayerPlan& plan, int page_size);

/// Tiles of one side's rows in pages. @param plan  valid, and pages hold it
TileSide tile_side(const TensorPlan& plan, int dim);

/// Bytes that a token and head of a side takes in pages: codes in whole words, scales, minima, and a centroid's index.
/// @param plan  valid
int page_row_bytes(const TensorPlan& plan, int dim);

/// Whether a side's numbers, its scales and minima or zero points, are bfloat16.
bool has_bfloat_scales(const TensorPlan& plan);

/// Type of a side's numbers. @param bfloat  numbers of two bytes are bfloat16, else fp16
ScaleType number_type_of(const TileSide& side, bool bfloat);

/// Where the codes of one head's row lie in the row's bits, if the side has bit tiles (pages.md, "Bit tiles"). Channels
/// of width 0 are in no segment.
/// @param plan  valid, not exact
std::vector<BitSegment> bit_segments(const TensorPlan& plan, int kv_head, int dim);

/// Format of a side as runtime/variants.json writes it: "u2g128"; "bf16" for exact rows; of bit tiles the words and the
/// numbers of a row, "w8n1". Behind that stand z for integer zero points, then b for bfloat16 numbers or f for fp32,
/// then the bytes of a centroid's index: "u4g128zf", "w13n4f", "u4g128i1".
/// @param bfloat  numbers of two bytes are bfloat16
std::string side_name(const TileSide& side, bool bfloat);

/// Layouts of a layer's two pools of exact rows; a pool without rows is not needed.
struct WindowLayouts {
  WindowLayout sinks, rings;
};

/// Layouts of the exact windows of a layer with these pages. Sinks have no rows without sink tokens, rings have none
/// without recent tokens.
/// @param max_rollback  most tokens that are taken back at once
WindowLayouts window_layouts_of(const PageLayout& pages, const Windows& windows, int max_rollback);

}  // namespace kvq
