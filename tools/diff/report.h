#pragma once

#include <kvq/container/json.h>
#include <kvq/diff/artifact_readings.h>
#include <kvq/diff/rules.h>
#include <kvq/diff/sameness.h>
#include <kvq/diff/verification.h>

#include <string>
#include <vector>

namespace kvq {

struct DiffReport {
  std::string before, after;  ///< names of the artifacts: paths, unless the user gave names
  Sameness sameness;
  std::vector<Check> verified_before, verified_after;  ///< checks of kvq-inspect --verify
  ArtifactDiff diff;
  std::vector<CheckResult> checks;
  bool has_dump = false;       ///< the user gave a held-out dump
  bool measured = false;       ///< on the dump: artifacts of one geometry
  bool nothing_coded = false;  ///< exact windows hold all tokens of the dump
  bool same_data = false;      ///< both artifacts were calibrated on the same tokens
  bool passed() const;
};

/// @param color  failures in red, for terminals
std::string diff_text(const DiffReport& report, bool color);
std::string diff_markdown(const DiffReport& report);
std::string diff_junit(const DiffReport& report);
/// formats/diff.schema.json
Json diff_json(const DiffReport& report);

}  // namespace kvq
