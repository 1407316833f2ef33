#include "calibrate/collect.h"

#include "common/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

namespace kvq {

StatsOrigin collect_with_progress(const Dump& dump, const CollectRequest& request, const PartsFolder& parts,
                                  bool resume, bool quiet, Backend& backend) {
  Progress progress(collect_work(request), quiet);
  const auto start = std::chrono::steady_clock::now();
  return collect_shards(dump, request, parts, resume, backend, [&](const CollectProgress& now) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    progress.update(now.done, fmt::format("layer {} ({}/{})  {:.0f} tokens/s", now.layer, now.index + 1,
                                          request.layers.size(), now.tokens / std::max(elapsed.count(), 1e-3)));
  });
}

}  // namespace kvq
