#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/stats/layer_stats.h>

#include <functional>

namespace kvq {

/// One pass over one loaded layer: the requested moments and the sample. Sums are double, borders fixed: the result
/// does not depend on the number of threads.
/// @param on_tokens  called now and then, from any thread, with the number of (token, KV head) rows attended so far and
/// in all
/// @throws           Error{usage} if a value moment is asked of a layer without values
LayerStats collect(const LayerActivations& layer, const StatsRequest& request,
                   const std::function<void(std::int64_t, std::int64_t)>& on_tokens = {});

/// Floating-point operations of collect() on this layer, for progress and --dry-run.
double collect_flops(const LayerGeometry& geometry, const std::vector<std::int64_t>& cu_seqlens,
                     const StatsRequest& request);

}  // namespace kvq
