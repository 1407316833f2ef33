#pragma once

#include "diff/readings.h"

#include <string>
#include <vector>

namespace kvq {

/// "attention_kl.p99<=+5%", "clip<=0.05", "top10_overlap>=-2%": a limit of the new value, absolute or against the old
/// one.
struct Rule {
  std::string text, metric;
  bool at_most = true;
  bool relative = false;
  double limit = 0.0;     ///< 0.05 for 5%
  bool demanded = false;  ///< asked for by the user: it fails where there is nothing to judge
};

/// @throws Error{usage} for a rule that is none, or a metric that does not exist
Rule parse_rule(const std::string& text);

/// Gates of a recalibration of the same method; those that need a dump are skipped without one.
const std::vector<std::string>& default_rules();

enum class Outcome { passed, failed, skipped };

struct CheckResult {
  Rule rule;
  Outcome outcome = Outcome::skipped;
  Reading worst;        ///< nearest to the limit or furthest beyond it
  double margin = 0.0;  ///< of `worst`: above 0 it is beyond
  std::size_t readings = 0, failures = 0;
};

/// Every rule against all readings of its metric. A new value that is NaN or infinite fails.
/// @param nothing_coded  see there: rules that need codes fail
std::vector<CheckResult> check_rules(const std::vector<Rule>& rules, const std::vector<Reading>& readings,
                                     bool nothing_coded);

/// "0.0312 -> 0.0340 (+9.0%) at layer 3", or the distance alone.
std::string describe(const Reading& reading);
/// A value of a reading: number_text(), but NaN by its name.
std::string value_text(double x);

}  // namespace kvq
