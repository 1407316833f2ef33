#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/page_layout.h>

namespace kvq {

/// How a plan's rows lie in pages (formats/pages.md, "Parameters, and what fits").
/// @param plan       valid
/// @param page_size  tokens: 16, 32 or 64
/// @throws           Error{unsupported} naming layer, side, what is supported and what was found, all faults at once
PageLayout page_layout_of(const LayerPlan& plan, int page_size);

/// The exact windows beside these pages; empty of rows where `windows` has no tokens.
/// @param step_tokens  the most that one call appends or takes back
WindowLayout window_layout_of(const PageLayout& pages, const Windows& windows, int step_tokens);

}  // namespace kvq
