#pragma once

#include <kvq/stats/layer_stats.h>

#include <cstddef>
#include <memory>

namespace kvq {

/// Statistics of all layers, loaded one at a time so that memory is bounded by one layer.
class StatsSource {
 public:
  virtual ~StatsSource() = default;
  virtual std::size_t size() const = 0;
  virtual std::shared_ptr<const LayerStats> load(std::size_t index) const = 0;
};

}  // namespace kvq
