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

/// Golden rows in pages: what a write kernel must make of them, and how far what it made is from that. On the host.
namespace kvq {

/// Pages 0, 1, ... with the rows as their bytes say, token i at position i.
/// @param plan  of the rows' heads
std::vector<std::byte> golden_pages(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows);

/// The rows for a model that computes in fp16, tokens in that type. Rows with numbers that fp16 rounds, which are very
/// small, are not firm any more.
/// @return  nothing if a number is beyond fp16's largest
std::optional<GoldenRows> golden_in_fp16(GoldenRows rows);

struct PageDifference {
  std::int64_t rows = 0, firm_rows = 0;
  std::int64_t firm_faults = 0;  ///< firm rows whose codes or numbers are others
  std::int64_t soft_faults = 0;  ///< other rows of which some channel is more than one step away
  std::string first = {};        ///< the first of these
};

/// @param pages  as a write kernel left them, [same size as golden_pages()]
PageDifference compare_pages(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows,
                             std::span<const std::byte> pages);

}  // namespace kvq
