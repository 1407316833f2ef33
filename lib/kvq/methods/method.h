#pragma once

#include <kvq/methods/options.h>
#include <kvq/stats/layer_stats.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvq {

/// Statistics of all layers, loaded one at a time so that memory is bounded by one layer.
class StatsSource {
 public:
  virtual ~StatsSource() = default;
  virtual std::size_t size() const = 0;
  virtual std::shared_ptr<const LayerStats> load(std::size_t index) const = 0;
};

/// Called after each decided layer, with the layer's index in the source.
using LayerDone = std::function<void(std::size_t)>;

/// One calibration method: an entry of the registry.
struct Method {
  std::string name;
  std::string summary;
  /// Sets this method's defaults on a fresh Options.
  void (*set_defaults)(Options&);
  /// Moments that decide() needs.
  std::set<Moment> (*needs)(const Options&);
  /// Pure function from statistics to plans, ascending layers.
  std::vector<LayerPlan> (*decide)(const StatsSource&, const Options&, const LayerDone&);
};

std::span<const Method> methods();
/// @throws Error{usage} listing the methods if no method has this name
const Method& find_method(const std::string& name);

}  // namespace kvq
