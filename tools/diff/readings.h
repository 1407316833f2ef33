#pragma once

#include "eval/results.h"

#include <kvq/artifact/artifact.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// A fact in which two artifacts differ.
struct Difference {
  std::string what, before, after;
};

/// One number that a rule can limit. A metric that does not apply to a layer has no reading there. A distance has no
/// `before`.
struct Reading {
  std::string metric;  ///< "clip", "attention_kl.p99", "layers.output_rel_mse", "heads.logit_rel_mse"
  std::string where;   ///< "layer 3 k", "layer 3 head 1", or empty
  std::optional<double> before;
  double after = 0.0;
  /// Both artifacts have one budget over all layers, and the budget gave this layer other code bits than before. Rules
  /// then judge the metric over all layers, not this reading.
  bool resized = false;
};

/// A metric that a rule can name. `needs_dump`: measured only with --model.
struct DiffMetric {
  std::string name, summary;
  bool needs_dump = false;
  bool distance = false;  ///< from the old artifact to the new one; readings have no `before`
};
const std::vector<DiffMetric>& diff_metrics();

struct ArtifactDiff {
  std::vector<Difference> differences;
  std::vector<Reading> readings;
};

/// Readings from the two files: structure, widths, rotations, clip ratios, tables, bytes.
ArtifactDiff diff_artifacts(const Artifact& before, const Artifact& after);

/// Readings from a dump: every metric of kvq-eval, as a mean over layers, of each layer and of each head. If one layer
/// of a mean is NaN, the mean is NaN.
/// @param exact    result of exact keys and values: a metric that is NaN there does not apply and has no reading
/// @param budgets  both artifacts have one budget over all layers
std::vector<Reading> diff_results(const CandidateResult& before, const CandidateResult& after,
                                  const CandidateResult& exact, bool budgets);

/// True if the artifact has codes, but its exact windows hold all tokens of the dump, so that no error comes from
/// codes.
bool nothing_coded(const CandidateResult& result);
/// Whether readings of `metric` say nothing if nothing_coded(): true for all measured metrics but `rope_logit_mae`,
/// which ignores the exact windows.
bool needs_codes(const std::string& metric);

}  // namespace kvq
