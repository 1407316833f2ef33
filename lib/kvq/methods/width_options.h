#pragma once

#include <kvq/methods/method.h>

#include <vector>

namespace kvq {

/// Options of mixed widths: scores, allocations, widths, mixing.
std::vector<OptionSpec> width_options();
OptionSpec mixing_option();

/// Options of one budget over layers and sides: the two sizes first.
std::vector<OptionSpec> budget_options();

/// With klt, a side without an allocation flag gets widths by channel. With balanced, a side without an allocation flag
/// gets one width if the method says so (Method::balanced_has_one_width).
/// @throws Error{usage} if --score is typed and keys have no widths by RoPE block
void settle_widths(const Method& method, Options& options, const GivenOptions& given);

/// A typed --budget-bytes takes the place of the method's default in bits.
void settle_budget(Options& options, const GivenOptions& given);

}  // namespace kvq
