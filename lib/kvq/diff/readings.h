#pragma once

#include <optional>
#include <string>
#include <vector>

/// What kvq-diff compares: readings of two artifacts, and rules about readings (formats/diff.md).
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

/// A metric that a rule can name.
struct ReadingName {
  std::string name, summary;     ///< no summary: help texts omit the name
  bool measured = false;         ///< on a dump, else read from the artifacts
  bool distance = false;         ///< from the old artifact to the new one; readings have no `before`
  bool ignores_windows = false;  ///< of measured ones: exact windows do not change readings
};

/// Names of all readings, in the order of help texts. Measured names come from kMetrics (kvq/eval/metrics.h).
const std::vector<ReadingName>& reading_names();
/// The row of a name, or null.
const ReadingName* find_reading_name(const std::string& name);

/// Whether readings of `metric` say nothing if exact windows hold all tokens of the dump.
bool needs_codes(const std::string& metric);

}  // namespace kvq
