#pragma once

#include <kvq/methods/option_spec.h>

#include <vector>

namespace kvq {

/// Options that every method has: how rows are stored, and transforms.
std::vector<OptionSpec> storage_options();

/// Options that every method has and that --help shows last: centroids and the seed.
std::vector<OptionSpec> centroid_options();

/// Applies what storage_options() and centroid_options() say of each other, after their values are set: a new coder
/// changes the default scale rule and clip ratio.
/// @param defaults  of the method
/// @throws Error{usage} if options contradict each other
void settle_shared(Options& options, const Options& defaults, const GivenOptions& given);

}  // namespace kvq
