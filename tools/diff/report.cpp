#include "diff/report.h"

#include "common/table.h"
#include "common/text_wrap.h"
#include "diff/words.h"

#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

constexpr std::size_t kMostDifferences = 30;

/// Text in red if the output has colors.
std::string red(const std::string& text, bool color) { return color ? "\x1b[31m" + text + "\x1b[0m" : text; }

/// Escapes text for XML text and attributes. Bytes that are not UTF-8 and characters that XML 1.0 forbids (control
/// characters, U+FFFE, U+FFFF) become U+FFFD.
std::string xml(const std::string& text) {
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  std::string escaped;
  for (const char c : utf8_text(text)) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
          escaped += kReplacement;
        else
          escaped += c;
    }
    if (escaped.ends_with("\xef\xbf\xbe") || escaped.ends_with("\xef\xbf\xbf")) escaped.back() = kReplacement.back();
  }
  return escaped;
}

/// Escapes text for a cell of a Markdown table.
std::string cell(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|' || c == '<' || c == '>' || c == '`' || c == '*' || c == '_' || c == '[' || c == '\\') escaped += '\\';
    escaped += c == '\n' ? ' ' : c;
  }
  return escaped;
}

/// Makes text safe between back quotes of Markdown.
std::string code_span(const std::string& text) {
  std::string plain = printable(text, 200);
  std::replace(plain.begin(), plain.end(), '`', '\'');
  return plain;
}

Json number_json(double x) { return std::isfinite(x) ? Json(x) : Json(); }

Json sameness_json(const Sameness& sameness) {
  Json numbers = Json::array();
  for (const NumberDifference& own : sameness.numbers) {
    Json json = {{"what", utf8_text(own.what)}, {"difference", number_json(own.difference)}};
    if (!own.where.empty()) json["where"] = own.where;
    numbers.push_back(std::move(json));
  }
  Json json = {
      {"verdict", to_string(sameness.verdict)}, {"numbers", std::move(numbers)}, {"golden_rows", sameness.golden_rows}};
  if (!sameness.reason.empty()) json["reason"] = sameness.reason;
  return json;
}

Json verification_json(const std::vector<Check>& checks) {
  Json json = Json::array();
  for (const Check& check : checks)
    json.push_back({{"name", check.name}, {"passed", check.passed}, {"detail", utf8_text(check.detail)}});
  return json;
}

Json reading_json(const Reading& reading) {
  Json json = {{"metric", reading.metric}, {"new", number_json(reading.after)}};
  if (reading.before) json["old"] = number_json(*reading.before);
  if (!reading.where.empty()) json["where"] = utf8_text(reading.where);
  if (reading.resized) json["resized"] = true;
  return json;
}

}  // namespace

bool DiffReport::passed() const {
  return std::none_of(checks.begin(), checks.end(),
                      [](const CheckResult& check) { return check.outcome == Outcome::failed; });
}

std::string diff_text(const DiffReport& report, bool color) {
  std::string text = fmt::format("old  {}\nnew  {}\n\nThe files are {}.\n", report.before, report.after,
                                 sameness_text(report.sameness));
  const auto& differences = report.diff.differences;
  if (differences.empty()) text += "Geometry, windows, method, options and codes agree.\n";
  if (!differences.empty()) {
    text += "\n";
    std::vector<std::vector<std::string>> rows{{"differs", "old", "new"}};
    for (std::size_t i = 0; i < std::min(differences.size(), kMostDifferences); ++i)
      rows.push_back({differences[i].what, printable(differences[i].before, 24), printable(differences[i].after, 24)});
    text += format_table(rows, "lll");
    if (differences.size() > kMostDifferences)
      text += fmt::format("and {} more, see --json\n", differences.size() - kMostDifferences);
  }
  std::vector<std::vector<std::string>> rows{{"over layers", "old", "new", "change"}};
  for (const Reading& reading : summary(report))
    rows.push_back({reading.metric, value_text(*reading.before), value_text(reading.after), change_of(reading)});
  text += "\n" + format_table(rows, "lrrr");
  rows = {{"", "rule", "worst"}};
  for (const CheckResult& check : report.checks)
    if (check.outcome != Outcome::skipped)
      rows.push_back({check.outcome == Outcome::failed ? red(word_of(check.outcome), color) : word_of(check.outcome),
                      check.rule.text, detail_text(check)});
  text += "\n" + format_table(rows, "lll");
  const auto skipped = std::count_if(report.checks.begin(), report.checks.end(),
                                     [](const CheckResult& check) { return check.outcome == Outcome::skipped; });
  if (skipped > 0) text += fmt::format("{} default rules had nothing to judge.\n", skipped);
  text += wrapped("", basis_text(report));
  if (report.nothing_coded) text += wrapped("", fmt::format("Nothing to judge: {}.", kNothingCoded));
  return text + (report.passed() ? "passed" : red("FAILED", color)) + "\n";
}

std::string diff_markdown(const DiffReport& report) {
  std::string text = fmt::format(
      "### kvq-diff: {}\n\n`{}` against `{}`\n\nThe files are {}.\n\n| | rule | worst |\n| --- | --- | --- |\n",
      report.passed() ? "passed" : "failed", code_span(report.after), code_span(report.before),
      cell(sameness_text(report.sameness)));
  for (const CheckResult& check : report.checks)
    if (check.outcome != Outcome::skipped)
      text += fmt::format("| {} | {} | {} |\n", check.outcome == Outcome::failed ? "**FAIL**" : "pass",
                          cell(check.rule.text), cell(detail_text(check)));
  text += "\n| over layers | old | new | change |\n| --- | ---: | ---: | ---: |\n";
  for (const Reading& reading : summary(report))
    text += fmt::format("| {} | {} | {} | {} |\n", cell(reading.metric), value_text(*reading.before),
                        value_text(reading.after), change_of(reading));
  text += fmt::format("\n{}\n", basis_text(report));
  if (report.nothing_coded) text += fmt::format("\nNothing to judge: {}.\n", kNothingCoded);
  if (report.diff.differences.empty()) return text;
  text += "\n<details><summary>What the files say differently</summary>\n\n| | old | new |\n| --- | --- | --- |\n";
  for (const Difference& difference : report.diff.differences)
    text += fmt::format("| {} | {} | {} |\n", cell(difference.what), cell(difference.before), cell(difference.after));
  return text + "\n</details>\n";
}

std::string diff_junit(const DiffReport& report) {
  std::size_t failures = 0, skipped = 0;
  std::string cases;
  for (const CheckResult& check : report.checks) {
    failures += check.outcome == Outcome::failed ? 1 : 0;
    skipped += check.outcome == Outcome::skipped ? 1 : 0;
    cases += fmt::format("    <testcase classname=\"kvq-diff\" name=\"{}\"", xml(check.rule.text));
    if (check.outcome == Outcome::passed) cases += "/>\n";
    if (check.outcome == Outcome::skipped) cases += "><skipped/></testcase>\n";
    if (check.outcome == Outcome::failed) {
      const std::string why = check.readings > 0 ? detail_text(check) : reason_of(check, false, report.nothing_coded);
      cases += fmt::format("><failure message=\"{}\"/></testcase>\n", xml(why));
    }
  }
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n  <testsuite name=\"kvq-diff {}\" tests=\"{}\" "
      "failures=\"{}\" skipped=\"{}\">\n{}  </testsuite>\n</testsuites>\n",
      xml(report.after), report.checks.size(), failures, skipped, cases);
}

Json diff_json(const DiffReport& report) {
  Json differences = Json::array(), readings = Json::array(), checks = Json::array();
  for (const Difference& difference : report.diff.differences)
    differences.push_back({{"what", difference.what}, {"old", difference.before}, {"new", difference.after}});
  for (const Reading& reading : report.diff.readings) readings.push_back(reading_json(reading));
  for (const CheckResult& check : report.checks) {
    Json json = {{"rule", check.rule.text},
                 {"outcome", check.outcome == Outcome::failed ? "failed" : word_of(check.outcome)},
                 {"readings", check.readings},
                 {"failures", check.failures}};
    if (check.outcome == Outcome::passed) json["outcome"] = "passed";
    if (const std::string reason = reason_of(check, false, report.nothing_coded); !reason.empty())
      json["reason"] = reason;
    if (check.readings > 0) json["worst"] = reading_json(check.worst);
    checks.push_back(std::move(json));
  }
  return {{"schema_version", "1.3"},
          {"tool", "kvq-diff " KVQ_VERSION},
          {"old", utf8_text(report.before)},
          {"new", utf8_text(report.after)},
          {"passed", report.passed()},
          {"sameness", sameness_json(report.sameness)},
          {"verification",
           {{"old", verification_json(report.verified_before)}, {"new", verification_json(report.verified_after)}}},
          {"measured", report.measured},
          {"same_data", report.same_data},
          {"differences", std::move(differences)},
          {"readings", std::move(readings)},
          {"checks", std::move(checks)}};
}

}  // namespace kvq
