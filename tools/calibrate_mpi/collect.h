#pragma once

#include "calibrate_mpi/channel.h"

#include <kvq/stats/shards.h>

namespace kvq {

/// What every rank does of collecting: it leads its group or serves it. Each layer's statistics become a part in
/// `parts`, which all ranks and rank 0 must see.
/// @return  on rank 0: all layers, as collect_shards() returns them; on others nothing of use
StatsOrigin collect_in_groups(const Channel& channel, const Dump& dump, const CollectRequest& request,
                              const PartsFolder& parts, bool resume, bool quiet);

}  // namespace kvq
