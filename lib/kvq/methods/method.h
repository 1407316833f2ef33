#pragma once

#include <kvq/methods/budget_report.h>
#include <kvq/methods/options.h>
#include <kvq/stats/layer_stats.h>
#include <kvq/stats/stats_source.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvq {

/// Called after each decided layer, with the layer's index in the source.
using LayerDone = std::function<void(std::size_t)>;

/// The result of a method.
struct Decision {
  std::vector<LayerPlan> plans;        ///< ascending layers
  std::optional<BudgetReport> budget;  ///< where one budget was spent over layers and sides
};

/// Tensors of a side's rotation in the artifact, before a transform changes it: --dry-run predicts sizes by them.
struct RotationTensors {
  bool matrix = false;  ///< [H, D, D]
  bool basis = false;   ///< eigenbasis [H, D, D] and spectrum [H, D]
  bool signs = false;   ///< [H, D]
};

/// One calibration method: an entry of the registry.
struct Method {
  std::string name;
  std::string summary;
  /// Flags of kvq-calibrate that some methods have and this one has. A flag that no method names belongs to all.
  std::vector<std::string> flags;
  /// Sets this method's defaults on a fresh Options.
  void (*set_defaults)(Options&);
  /// Moments that decide() needs.
  std::set<Moment> (*needs)(const Options&);
  /// Tensors that a side's rotation will have.
  RotationTensors (*tensors)(const Options&, Side, int dim);
  /// Pure function from statistics to plans.
  Decision (*decide)(const StatsSource&, const Options&, const LayerDone&);
};

std::span<const Method> methods();
/// @throws Error{usage} listing the methods if no method has this name
const Method& find_method(const std::string& name);

}  // namespace kvq
