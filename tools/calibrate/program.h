#pragma once

#include "calibrate/flags.h"

#include <kvq/stats/shards.h>

#include <functional>
#include <vector>

namespace kvq {

/// Collects a dump into the parts. @param quiet  no progress
using CollectDump = std::function<StatsOrigin(const Dump& dump, const CollectRequest& request, const PartsFolder& parts,
                                              bool resume, bool quiet, Backend& backend)>;

/// All that kvq-calibrate does after its flags are parsed. @return the exit code
/// @param collect  called at most once, with the outputs claimed
int calibrate(const CalibrateFlags& flags, const CollectDump& collect);

Dump open_dump(const Inputs& inputs);

/// What the flags ask for, of a dump that has it. @throws Error{usage}
CollectRequest checked_request(const CalibrateFlags& flags, const Options& options, const Dump& dump);

}  // namespace kvq
