#include "diff/words.h"

#include "eval/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

std::string value_text(double x) { return std::isnan(x) ? "NaN" : number_text(x); }

std::string describe(const Reading& reading) {
  const std::string place = reading.where.empty() ? "" : " at " + reading.where;
  if (!reading.before) return value_text(reading.after) + place;
  const std::string change = change_of(reading);
  return fmt::format("{} -> {}{}{}", value_text(*reading.before), value_text(reading.after),
                     change.ends_with('%') ? fmt::format(" ({})", change) : "", place);
}

const char* word_of(Outcome outcome) {
  return outcome == Outcome::passed ? "pass" : outcome == Outcome::failed ? "FAIL" : "skipped";
}

std::vector<Reading> summary(const DiffReport& report) {
  std::vector<Reading> chosen;
  std::copy_if(report.diff.readings.begin(), report.diff.readings.end(), std::back_inserter(chosen),
               [](const Reading& reading) { return reading.where.empty() && reading.before; });
  return chosen;
}

std::string change_of(const Reading& reading) {
  constexpr double kReadable = 1e6;  // percent
  const double before = *reading.before, change = 100.0 * (reading.after - before) / std::abs(before);
  if (before == reading.after) return "=";
  if (before == 0.0 || !std::isfinite(change)) return "-";
  return std::abs(change) < kReadable ? fmt::format("{:+.1f}%", change) : fmt::format("{:+.1e}%", change);
}

const char* basis_text(const DiffReport& report) {
  if (report.measured)
    return report.same_data ? "Attention was measured on the held-out dump."
                            : "Attention was measured on the held-out dump. The artifacts come from different data.";
  if (report.has_dump) return "Attention was not measured, because artifacts of different geometry share no dump.";
  if (report.same_data) return "Only the files were judged, not what they do to attention: add --model HELDOUT.h5.";
  return "Only the files were judged. They come from different data, which moves files as much as damage does: add "
         "--model HELDOUT.h5 to judge by attention.";
}

std::string reason_of(const CheckResult& check, bool short_text, bool nothing_coded) {
  if (check.outcome != Outcome::failed) return {};
  if (check.readings > 0) return std::isnan(check.margin) ? "not a finite number" : "";
  const bool windows = nothing_coded && needs_codes(check.rule.metric) && !short_text;
  return windows ? fmt::format("nothing to judge: {}", kNothingCoded) : "nothing to judge";
}

std::string detail_text(const CheckResult& check) {
  std::string reason = reason_of(check, true, false);
  if (check.readings == 0) return reason;
  const std::string more = check.failures > 1 ? fmt::format(", {} of {} fail", check.failures, check.readings) : "";
  return (reason.empty() ? "" : reason + ": ") + describe(check.worst) + more;
}

std::string sameness_text(const Sameness& sameness) {
  if (sameness.verdict == SamenessVerdict::identical) return "identical";
  if (sameness.verdict == SamenessVerdict::different) return fmt::format("different ({})", sameness.reason);
  constexpr std::size_t kMostNumbers = 3;
  std::string text = "equal but for rounding: ";
  for (std::size_t i = 0; i < std::min(sameness.numbers.size(), kMostNumbers); ++i) {
    const NumberDifference& own = sameness.numbers[i];
    text += fmt::format("{}{} {:.1e}{}", i == 0 ? "" : ", ", own.what, own.difference,
                        own.where.empty() ? "" : " at " + own.where);
  }
  return text +
         fmt::format("{}{} golden rows coded otherwise", sameness.numbers.empty() ? "" : "; ", sameness.golden_rows);
}

}  // namespace kvq
