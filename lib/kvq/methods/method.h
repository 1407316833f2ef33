#pragma once

#include <kvq/compute/backend.h>
#include <kvq/methods/budget_report.h>
#include <kvq/methods/held_out_error.h>
#include <kvq/methods/option_spec.h>
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

/// What a method computes with, and where it says how far it is.
struct MethodContext {
  LayerDone done = {};
  Backend& backend = cpu_backend();
};

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

/// One step of an ablation: the report of the same budget after one more ingredient was switched on.
struct AblationRow {
  std::string ingredient;
  BudgetReport report;
};

/// What a decision comes to with a target.
struct TargetRow {
  Target target = Target::runtime;
  std::optional<BudgetReport> report;
  double row_bytes = 0.0;  ///< of a coded row in pages, mean
  int layers = 0;
  int tuned_layers = 0;  ///< that a tuned kernel decodes, with bfloat16 activations
  std::optional<HeldOutReport> held_out;
};

/// What parts of a decision bring.
struct Ablation {
  std::vector<AblationRow> ingredients;  ///< may be empty
  std::vector<TargetRow> targets;        ///< runtime and free
};

/// One calibration method: an entry of the registry. Flags, help texts, refusals and the manifest come from its rows of
/// options; no tool knows a method by name.
struct Method {
  std::string name;
  std::string summary;
  /// Beside the options that every method has (shared_options.h). Methods may have a row in common.
  std::vector<OptionSpec> options = {};
  /// With --transform balanced, a side without an allocation flag gets one width, because balanced coordinates mix the
  /// channels of RoPE blocks.
  bool balanced_has_one_width = false;
  /// Sets this method's defaults on a fresh Options.
  void (*set_defaults)(Options&);
  /// Derives options from others after all values are set, and refuses what contradicts the method. Null: nothing.
  void (*settle)(const Method&, Options&, const GivenOptions&) = nullptr;
  /// Moments that decide() needs.
  std::set<Moment> (*needs)(const Options&);
  /// Tensors that a side's rotation will have.
  RotationTensors (*tensors)(const Options&, Side, int dim);
  /// Pure function from statistics to plans.
  Decision (*decide)(const StatsSource&, const Options&, const MethodContext&);
  /// What each ingredient of the method brings at the budget of `options`, and what both targets come to. Null: the
  /// method has no ablation.
  Ablation (*ablate)(const StatsSource&, const Options&, Backend&) = nullptr;
};

std::span<const Method> methods();
/// @throws Error{usage} listing the methods if no method has this name
const Method& find_method(const std::string& name);

}  // namespace kvq
