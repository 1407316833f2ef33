#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/container/json.h>

#include <span>
#include <string>

namespace kvq {

/// `count` channels of one width as digits: "2222". With `color`, each width has a color of its own.
std::string width_cells(int width, int count, bool color);
/// A bar of `cells` digits, widest channels first; each digit is the width of the channel in the middle of the cell.
/// @param widths  in any order, of all heads
std::string width_bar(std::span<const std::uint8_t> widths, int cells, bool color);
/// Excess cost of the widths over the optimum with as many bits and without the layout's granule: "+0.3%"; "-" if that
/// optimum costs 0.
std::string over_free_text(const BitAllocation& allocation);

/// Tables for the overview: a bar with statistics, how often each width occurs, and both of all layers together. Empty
/// if no side is mixed.
std::string describe_widths(const Artifact& artifact, bool color);
/// The same of all layers together: an object with `k`, `v` or both. Null if no side is mixed.
Json model_widths_json(const Artifact& artifact);
/// Two lines about a mixed side: score, entropy, bytes of a row, cost.
std::string widths_summary(const TensorPlan& plan, int dim);

}  // namespace kvq
