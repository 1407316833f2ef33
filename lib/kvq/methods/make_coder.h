#pragma once

#include <kvq/methods/options.h>
#include <kvq/solve/bit_budget.h>
#include <kvq/solve/fit.h>

#include <span>

namespace kvq {

/// Coder of a side whose channels all have one width.
Coder make_coder(const Options& options, Side side, int group_size);

/// Coder of mixed rows that use these widths. Codebooks are made later, for the lengths of the segments: see
/// fit_tables().
Coder make_mixed_coder(const Options& options, Side side, const BitAllocation& allocation, int dim);

/// Relative squared errors of a coder at 0 to 8 bits, on Gaussian rows.
const RateLaw& rate_law(CoderKind kind);

/// Whether fit_tables() reads rows for this coder.
bool fit_needs_rows(const Coder& coder);

/// Fills the tables of a codebook coder, one per head and width: Lloyd-Max for the sphere of the group's dimension, or
/// Lloyd on the rotated rows in units of each group's root mean square (--codebook fitted). Other coders stay
/// unchanged.
/// @param heads  [H] for each entry of the scope, the rotated rows of its heads
void fit_tables(TensorPlan& plan, bool fitted, std::span<const std::vector<RotatedData>> heads);

}  // namespace kvq
