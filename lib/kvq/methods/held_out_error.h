#pragma once

#include <kvq/compute/backend.h>
#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>
#include <kvq/stats/stats_source.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace kvq {

/// What plans do to attention on tokens that no statistic contains: squared error of attention's output over the
/// output's own square, with all tokens quantized (exact windows do not count), mean over layers. The errors of keys
/// and of values are measured apart and added. For a layer without values the keys take the place of the values.
struct HeldOutReport {
  std::int64_t tokens = 0;      ///< held out, of each layer
  double output_error = 0.0;    ///< of the plans
  double baseline_error = 0.0;  ///< of plain_baseline() in the place of each coded side
};

/// Missing if a layer's statistics hold no held-out tokens, or if a plan has centroids.
std::optional<HeldOutReport> held_out_report(const StatsSource& source, const std::vector<LayerPlan>& plans,
                                             Backend& backend);

/// The manifest's form of a report, `calibration.held_out` (formats/artifact.md).
Json held_out_to_json(const HeldOutReport& report);

}  // namespace kvq
