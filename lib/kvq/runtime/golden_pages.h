#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// Golden rows in pages, on the host: the pages that a write kernel must produce, and their comparison with the pages
/// that it did produce.
namespace kvq {

/// Pages 0, 1, ... with the expected bytes of the rows, token i at position i.
/// @param plan  of the rows' heads
std::vector<std::byte> golden_pages(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows);

/// The rows for a model that computes in fp16, with tokens converted to fp16. If the conversion rounds a number of a
/// row (only very small ones), the row is not firm any more.
/// @return  nothing if a number is beyond fp16's largest
std::optional<GoldenRows> golden_in_fp16(GoldenRows rows);

struct PageDifference {
  std::int64_t rows = 0, firm_rows = 0;
  std::int64_t firm_faults = 0;  ///< firm rows with other codes, scales, minima or centroids
  std::int64_t soft_faults = 0;  ///< other rows with a channel that is more than one step away, or, of codebooks,
                                 ///< trellises and mixed widths, all channels on average
  std::string first = {};        ///< description of the first fault
};

/// @param pages  written by a write kernel, [same size as golden_pages()]
PageDifference compare_pages(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows,
                             std::span<const std::byte> pages);

}  // namespace kvq
