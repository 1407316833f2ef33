#pragma once

#include <kvq/diff/readings.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace kvq {

/// A limit of a metric's new value, absolute ("clip<=0.05") or relative to the old value ("attention_kl.p99<=+5%",
/// "top10_overlap>=-2%").
struct Rule {
  std::string text, metric;
  bool at_most = true;
  bool relative = false;
  double limit = 0.0;     ///< 0.05 for 5%
  bool demanded = false;  ///< the user gave the rule: it fails if there is no reading
};

/// @throws Error{usage} if the text is no rule or names an unknown metric
Rule parse_rule(const std::string& text);

/// A rule that holds unless the user replaces it.
struct DefaultRule {
  const char* text;
  /// A calibration on other text may break the rule although nothing got worse. Where attention is measured, the rule
  /// is checked only if both artifacts come from the same data.
  bool follows_data = false;
};

/// Default rules, for a recalibration by the same method. check_rules() skips a rule that needs a dump if there is
/// none.
std::span<const DefaultRule> default_rules();

/// What the rules can rest on.
struct Evidence {
  bool measured = false;   ///< both artifacts are measured on a held-out dump
  bool same_data = false;  ///< both artifacts were calibrated on the same tokens of the same dump
};

enum class Outcome { passed, failed, skipped };

struct CheckResult {
  Rule rule;
  Outcome outcome = Outcome::skipped;
  Reading worst;        ///< nearest to the limit, or furthest beyond it
  double margin = 0.0;  ///< of `worst`: above 0 it is beyond the limit
  std::size_t readings = 0, failures = 0;
};

/// The rules to check: default rules of the metrics that no rule of `own` names, then `own`.
std::vector<Rule> choose_rules(const std::vector<Rule>& own, bool with_default_rules, Evidence evidence);

/// Checks each rule against all readings of its metric. A new value that is NaN or infinite fails.
/// @param nothing_coded  result of nothing_coded(): if true, rules that need codes fail
std::vector<CheckResult> check_rules(const std::vector<Rule>& rules, const std::vector<Reading>& readings,
                                     bool nothing_coded);

}  // namespace kvq
