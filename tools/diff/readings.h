#pragma once

#include "eval/results.h"

#include <kvq/artifact/artifact.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// Something that two artifacts say differently.
struct Difference {
  std::string what, before, after;
};

/// One number that rules can be about; what does not apply to a layer has no reading there. A distance has no `before`.
struct Reading {
  std::string metric;  ///< "clip", "attention_kl.p99", "layers.output_rel_mse", "heads.logit_rel_mse"
  std::string where;   ///< "layer 3 k", "layer 3 head 1", or empty
  std::optional<double> before;
  double after = 0.0;
  /// The layer has other code bits than before, as one budget over all layers, which both have, may decide: rules judge
  /// only what that did to all layers together.
  bool resized = false;
};

/// All metrics that exist, with what they mean; `needs_dump`: only with --model.
struct DiffMetric {
  std::string name, summary;
  bool needs_dump = false;
  bool distance = false;  ///< from the old artifact: readings have no old value
};
const std::vector<DiffMetric>& diff_metrics();

struct ArtifactDiff {
  std::vector<Difference> differences;
  std::vector<Reading> readings;
};

/// What the two files say: structure, widths, rotations, clip ratios, tables, bytes.
ArtifactDiff diff_artifacts(const Artifact& before, const Artifact& after);

/// What they do to a dump: every metric of kvq-eval, over layers, of each layer and of each head. The mean over layers
/// of which one is NaN is NaN.
/// @param exact    the same of exact keys and values: what is NaN there does not apply, and has no reading
/// @param budgets  both artifacts spent one budget over their layers
std::vector<Reading> diff_results(const CandidateResult& before, const CandidateResult& after,
                                  const CandidateResult& exact, bool budgets);

/// The windows of an artifact hold all that the dump has: it has codes, and none of them was read.
bool nothing_coded(const CandidateResult& result);
/// The readings that do not tell of codes then: all that are measured but `rope_logit_mae`, which knows no windows.
bool needs_codes(const std::string& metric);

}  // namespace kvq
