#pragma once

#include <kvq/codec/integer_search.h>
#include <kvq/plan/layer_plan.h>

namespace kvq {

/// A bound of the costs in the search in pairs (pair_search.cuh), of all rows: how much a path through any state, with
/// the code that it takes next, may cost more or less than the best path to the reference state. In units of y squared;
/// the search has room for pair_cost_room().
///
/// Let o be the codes before the last m ones on the best path to a state A. The best path to a state B costs at most
/// what B costs behind o. So the difference of the two is at most a function of A, B, o and the gains of the last m
/// steps, which are linear in y; it is largest with each y at an end of its range.
double pair_cost_bound(const IntegerSearch& search, int reference);
/// Costs have 14 bits and a sign, beside the two bits of dropped codes; less a unit for the rounding of costs and
/// gains.
constexpr double pair_cost_room(int unit) { return 8191.0 / unit - 1.0; }

/// The memory of the trellis of rows that are searched in pairs (pair_rows.h): one group of 128 two-bit codes, searched
/// in integers, of memory 1 to 3, with an fp16 scale by the rule norm or rms, whose costs fit, and a gain between 2^-14
/// and 2^14. 0 for all other rows.
int pair_search_memory(const TensorPlan& plan, int num_kv_heads, int dim);

}  // namespace kvq
