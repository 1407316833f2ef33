#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/core/text.h>
#include <kvq/diff/rules.h>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace kvq {

namespace {

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw Error{ErrorKind::usage, fmt::format("--fail-on \"{}\": {}", printable(text, 80), why),
              "a rule is METRIC<=LIMIT or METRIC>=LIMIT, such as attention_kl.p99<=+5% or clip<=0.05"};
}

double parse_number(const std::string& text, const std::string& whole) {
  double value = 0.0;
  const char* first = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, failed] = std::from_chars(first, text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    refuse(whole, fmt::format("expected a number, found \"{}\"", printable(text, 40)));
  return value;
}

/// How far a reading is beyond the rule's limit, in the rule's unit. NaN if the new value is not finite, or the old
/// value of a relative rule is not finite.
double margin_of(const Rule& rule, const Reading& reading) {
  if (!std::isfinite(reading.after)) return NAN;
  if (!rule.relative) return rule.at_most ? reading.after - rule.limit : rule.limit - reading.after;
  const double before = reading.before.value_or(0.0);
  if (reading.after == before) return rule.at_most ? -rule.limit : rule.limit;
  if (before == 0.0)
    return rule.at_most == (reading.after > 0.0) ? HUGE_VAL : -HUGE_VAL;  // any change from 0 is infinite
  const double change = (reading.after - before) / std::abs(before);
  return rule.at_most ? change - rule.limit : rule.limit - change;
}

}  // namespace

Rule parse_rule(const std::string& text) {
  Rule rule{.text = text, .metric = {}};
  const std::size_t sign = text.find_first_of("<>");
  if (sign == std::string::npos || sign + 1 >= text.size() || text[sign + 1] != '=') refuse(text, "expected <= or >=");
  rule.metric = text.substr(0, sign);
  rule.at_most = text[sign] == '<';
  std::string limit = text.substr(sign + 2);
  rule.relative = limit.ends_with('%');
  if (rule.relative) limit.pop_back();
  rule.limit = parse_number(limit, text) / (rule.relative ? 100.0 : 1.0);
  const ReadingName* row = find_reading_name(rule.metric);
  if (row == nullptr) {
    std::vector<std::string> names;
    for (const ReadingName& known : reading_names()) names.push_back(known.name);
    const std::string nearest = nearest_name(rule.metric, names);
    refuse(text, fmt::format("there is no metric \"{}\"{}", printable(rule.metric, 40),
                             nearest.empty() ? "" : fmt::format(", did you mean {}?", nearest)));
  }
  if (rule.relative && row->distance)
    refuse(text, fmt::format("{0} is a distance, which has no old value; write {0}{1}{2}", rule.metric,
                             rule.at_most ? "<=" : ">=", rule.limit));
  return rule;
}

std::span<const DefaultRule> default_rules() {
  // Each limit lies above the change that another seed causes and below the change that damage causes, on the sample
  // model (tests/cli/test_diff.py). Those that do not follow the data also lie above the change that other text
  // causes (scripts/experiments/false_alarms.py).
  static constexpr DefaultRule kRules[] = {
      {"verification<=0"},
      {"golden_rows.lost<=0"},
      {"geometry<=0"},
      {"windows<=0"},
      {"codes<=0"},
      {"orthogonality<=0.0001"},
      {"rotation.factor<=0.05"},
      {"rotation.covariance<=0.5", true},
      {"rotation.importance<=0.8"},
      {"transform.gauge<=4", true},
      {"transform.outlier_gain<=0.5"},
      {"clip<=0.1"},
      {"center<=0.5", true},
      {"trellis<=0"},
      {"allocation.hamming<=0.25"},
      {"layers.allocation.hamming<=0.2"},
      {"heads.allocation.hamming<=0.35"},
      {"layers.allocation.regret<=0.05", true},
      {"bytes_per_token<=+1%"},
      {"effective_bits>=-1%", true},
      {"codebook<=0.2", true},
      {"centroids<=2"},
      {"layers.calibration_error<=+25%", true},
      {"attention_kl.mean<=+5%"},
      {"attention_kl.p99<=+10%"},
      {"output_rel_mse<=+5%"},
      {"rope_logit_mae<=+5%"},
      {"layers.attention_kl.mean<=+50%"},
      {"layers.output_rel_mse<=+15%"},
      {"heads.logit_rel_mse<=+25%"},
      {"heads.v_rel_mse<=+25%", true},
      {"top10_overlap>=-2%"},
  };
  return kRules;
}

std::vector<Rule> choose_rules(const std::vector<Rule>& own, bool with_default_rules, Evidence evidence) {
  std::vector<Rule> rules;
  if (with_default_rules)
    for (const DefaultRule& row : default_rules()) {
      if (row.follows_data && evidence.measured && !evidence.same_data) continue;
      Rule rule = parse_rule(row.text);
      if (std::none_of(own.begin(), own.end(), [&](const Rule& other) { return other.metric == rule.metric; }))
        rules.push_back(std::move(rule));
    }
  rules.insert(rules.end(), own.begin(), own.end());
  return rules;
}

std::vector<CheckResult> check_rules(const std::vector<Rule>& rules, const std::vector<Reading>& readings,
                                     bool nothing_coded) {
  std::vector<CheckResult> results;
  for (const Rule& rule : rules) {
    CheckResult result{.rule = rule, .worst = {}};
    for (const Reading& reading : readings) {
      if (reading.metric != rule.metric || reading.resized || (rule.relative && !reading.before)) continue;
      const double margin = margin_of(rule, reading);
      const bool broken = !(margin <= 1e-12);
      const bool worse = result.readings == 0 || std::isnan(margin) || margin > result.margin;
      ++result.readings;
      if (broken) ++result.failures;
      if (!worse || std::isnan(result.margin)) continue;
      result.worst = reading;
      result.margin = margin;
    }
    if (result.readings > 0)
      result.outcome = result.failures > 0 ? Outcome::failed : Outcome::passed;
    else if (rule.demanded || (nothing_coded && needs_codes(rule.metric)))
      result.outcome = Outcome::failed;
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace kvq
