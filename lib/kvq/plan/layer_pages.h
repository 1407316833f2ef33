#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/page_layout.h>

namespace kvq {

/// Layout of the pages for a layer's plan (formats/pages.md, "Parameters, and what fits").
/// @param plan       valid
/// @param page_size  tokens: 16, 32 or 64
/// @throws           Error{unsupported} naming layer, side, what is supported and what was found, all faults at once
PageLayout page_layout_of(const LayerPlan& plan, int page_size);

/// Layout of the exact windows of a layer with these pages. sink_rows is 0 without sink tokens, ring_rows is 0 without
/// recent tokens.
/// @param step_tokens  largest number of tokens that one call appends or takes back
WindowLayout window_layout_of(const PageLayout& pages, const Windows& windows, int step_tokens);

}  // namespace kvq
