#pragma once

#include <kvq/artifact/artifact.h>

#include <span>
#include <string>

namespace kvq {

/// `count` channels of one width as digits: "2222". With colour each width has its own.
std::string width_cells(int width, int count, bool color);
/// Widths, widest first, as a bar of `cells` digits; a cell is the width of the channel in its middle.
/// @param widths  in any order, of all heads together
std::string width_bar(std::span<const std::uint8_t> widths, int cells, bool color);
/// What the widths cost more than the optimum of as many bits without the layout's granule: "+0.3%"; "-" if that costs
/// nothing.
std::string over_free_text(const BitAllocation& allocation);

/// Two tables for the overview, empty if no side is mixed: a bar and statistics, and how often each width occurs.
std::string describe_widths(const Artifact& artifact, bool color);
/// Two lines about a mixed side: by which score, entropy, bytes of a row, cost.
std::string widths_summary(const TensorPlan& plan, int dim);

}  // namespace kvq
