#pragma once

#include "calibrate/collect.h"
#include "calibrate/flags.h"

#include <kvq/artifact/artifact.h>

namespace kvq {

/// What the flags ask to be collected. @throws Error{usage}
StatsRequest make_request(const CalibrateFlags& flags, const Options& options);

/// Tokens of the dump that the flags name: all of it, or --first-token and --num-tokens.
TokenRange chosen_tokens(const CalibrateFlags& flags, const Dump& dump);

/// A layer number of --exact-layers that is not among the layers at hand. @throws Error{usage}
void check_exact_layers(const Options& options, const ModelGeometry& model);

/// Plans of all layers, with their provenance.
Artifact decide(const StatsOrigin& origin, const CalibrateFlags& flags, const Options& options, bool quiet);

}  // namespace kvq
