#pragma once

#include <kvq/stats/shards.h>

namespace kvq {

/// collect_shards() with a progress line that shows the run's mean tokens per second.
StatsOrigin collect_with_progress(const Dump& dump, const CollectRequest& request, const PartsFolder& parts,
                                  bool resume, bool quiet, Backend& backend);

}  // namespace kvq
