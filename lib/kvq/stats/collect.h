#pragma once

#include <kvq/compute/backend.h>
#include <kvq/dump/dump_file.h>
#include <kvq/stats/layer_stats.h>

#include <functional>

namespace kvq {

/// Collects the requested moments and the sample of a loaded layer in one pass. Sums are in double with fixed borders,
/// so the result does not depend on the number of threads.
/// @param backend    does what touches all tokens
/// @param on_tokens  called from time to time, from any thread, with two numbers of (token, KV head) rows: those that
///                   the attention pass has finished, and all
/// @throws           Error{usage} if a value moment is requested for a layer without values, if the dump does not mark
///                   generated tokens although the request chooses queries by them, or if no query is left
LayerStats collect(const LayerActivations& layer, const StatsRequest& request, Backend& backend = cpu_backend(),
                   const std::function<void(std::int64_t, std::int64_t)>& on_tokens = {});

/// Floating-point operations of collect() on this layer, for progress and --dry-run.
double collect_flops(const LayerGeometry& geometry, const std::vector<std::int64_t>& cu_seqlens,
                     const StatsRequest& request);

}  // namespace kvq
