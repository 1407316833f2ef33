#pragma once

#include "calibrate/flags.h"

#include <kvq/artifact/artifact.h>
#include <kvq/stats/shards.h>

namespace kvq {

/// The statistics that `behavior` and the method need. @throws Error{usage}
StatsRequest make_request(const Behavior& behavior, const Options& options);

/// The token range of --first-token and --num-tokens; without these flags all tokens of the dump.
TokenRange chosen_tokens(const Inputs& inputs, const Dump& dump);

/// @throws Error{usage} if --queries needs marks of generated tokens that the dump does not have
void check_queries(const StatsRequest& request, const Inputs& inputs, const Dump& dump);

/// @throws Error{usage} if --exact-layers names a layer that `model` does not have, or if a group size does not divide
///         the head dimension of a layer
void check_layers(const Options& options, const ModelGeometry& model);

/// Decides the plans of all layers and records their provenance.
Artifact decide(const StatsOrigin& origin, std::int64_t golden_tokens, const Options& options, bool quiet,
                Backend& backend = cpu_backend());

}  // namespace kvq
