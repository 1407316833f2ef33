#pragma once

#include <kvq/compute/backend.h>
#include <kvq/methods/options.h>
#include <kvq/solve/bit_budget.h>

#include <span>

namespace kvq {

/// Coder of a side whose channels all have one width.
Coder make_coder(const Options& options, Side side, int group_size);

/// Coder of mixed rows that use these widths. Codebooks are made later, for the lengths of the segments: see
/// fit_tables().
Coder make_mixed_coder(const Options& options, Side side, const BitAllocation& allocation, int dim);

/// What options, allocations and predictions ask of a coder.
struct CoderTraits {
  double most_bits;        ///< where all channels have one width
  bool has_mixed_widths;   ///< whether channels may have widths of their own
  ScaleRule default_rule;  ///< where a user names the coder and no rule
  RateLaw law;             ///< relative squared errors at 0 to 8 bits, on Gaussian rows
  double code_seconds;     ///< to quantize one channel, measured with a release build
};
const CoderTraits& traits_of(CoderKind kind);

/// Whether fit_tables() reads rows for this coder.
bool fit_needs_rows(const Coder& coder);

/// Fills the tables of a codebook coder, one per head and width: Lloyd-Max for the sphere of the group's dimension, or
/// Lloyd on the rotated rows in units of each group's root mean square (--codebook fitted). Other coders stay
/// unchanged.
/// @param heads  [H] for each entry of the scope, the rotated rows of its heads
void fit_tables(TensorPlan& plan, bool fitted, std::span<const std::vector<RotatedData>> heads, Backend& backend);

}  // namespace kvq
