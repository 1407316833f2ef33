#include "common/cli.h"
#include "common/describe.h"
#include "common/progress.h"
#include "common/text_output.h"
#include "common/wrong_file.h"
#include "diff/html.h"
#include "diff/report.h"

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/diff/measured_readings.h>
#include <kvq/dump/dump_file.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <limits>

namespace kvq {

namespace {

struct DiffFlags {
  std::string before, after, before_name, after_name, junit, html;
  std::vector<std::string> dumps, rules;
  bool no_default_rules = false, no_windows = false, json = false, markdown = false, quiet = false;
  int threads = 0;
  std::int64_t seed = 0;
};

/// Default rules. A + marks those that are left out where calibrations on other data are measured.
std::string rule_list() {
  std::string text = " ";
  for (const DefaultRule& row : default_rules()) text += fmt::format(" {}{}", row.text, row.follows_data ? "+" : "");
  return text;
}

/// Names of the parts of a distribution: "mean, median, p95, p99 or max".
std::string part_list() {
  std::string text;
  const auto parts = distribution_parts();
  for (std::size_t i = 0; i < parts.size(); ++i)
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 < parts.size() ? ", " : " or ", parts[i].name);
  return text;
}

std::string metric_list() {
  std::string text;
  for (const ReadingName& row : reading_names())
    if (!row.summary.empty()) text += fmt::format("  {:<28} {}{}\n", row.name, row.summary, row.measured ? " *" : "");
  for (const Metric metric : all_metrics())
    if (metric->per_query)
      text += fmt::format("  {:<28} {} of {} *\n", fmt::format("{}.<part>", metric->name), part_list(),
                          metric->query_summary);
  return text + "layers.<metric> and heads.<metric> are those of each layer and KV head; a rule holds for all of them.";
}

ToolText tool_text() {
  return {
      .name = "kvq-diff",
      .summary = "compares two calibration artifacts and judges the new one by rules",
      .description =
          "Compares two calibration artifacts of a model, and fails where the new one is worse than rules allow.",
      .examples = {{"kvq-diff old.safetensors new.safetensors", "what the files say"},
                   {"kvq-diff old.safetensors new.safetensors --model heldout.h5", "and what they do to attention"},
                   {"kvq-diff old.safetensors new.safetensors --junit diff.xml", "a report for CI"},
                   {"kvq-diff old.safetensors new.safetensors --model heldout.h5 --html diff.html",
                    "charts by layer and head"},
                   {"kvq-diff old.safetensors new.safetensors --fail-on 'clip<=0.05'", "a rule of one's own"}},
      .first_flags = {"--model", "--fail-on", "--no-default-rules", "--no-windows", "--markdown", "--json", "--junit",
                      "--html", "--threads", "--quiet"},
      .sections = {{"Metrics (* needs --model; formats/eval.md)", metric_list()},
                   {"Default rules", rule_list()},
                   {"Rules",
                    "A limit is absolute, or with % against the old value. Rules with a + are left out if attention is "
                    "measured and the artifacts come from different data, because other text moves these distances as "
                    "much as damage does."}},
  };
}

void add_flags(CLI::App& app, DiffFlags& f) {
  app.add_option("old", f.before, "artifact to compare with")->required()->type_name("FILE");
  app.add_option("new", f.after, "artifact to judge")->required()->type_name("FILE");
  app.add_option("-m,--model", f.dumps, "held-out dump to measure both on; may be given several times")
      ->type_name("FILE")
      ->allow_extra_args(false);
  app.add_option("--fail-on", f.rules, "rule, in place of the default ones of its metric; may be given several times")
      ->type_name("RULE")
      ->allow_extra_args(false);
  app.add_flag("--no-default-rules", f.no_default_rules, "only the rules given with --fail-on");
  app.add_flag("--no-windows", f.no_windows, "measure every token as codes, also those of sink and recent windows");
  app.add_option("--junit", f.junit,
                 "also write the checks as JUnit XML to this file; - is standard output, without the text")
      ->type_name("FILE");
  app.add_option("--html", f.html,
                 "also write the report as a page with charts to this file; - is standard output, without the text")
      ->type_name("FILE");
  app.add_option("--old-name", f.before_name, "name of OLD in reports [its path]")->type_name("NAME");
  app.add_option("--new-name", f.after_name, "name of NEW in reports [its path]")->type_name("NAME");
  app.add_option("--seed", f.seed, "of pairs of tokens")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  app.add_option("--threads", f.threads, "threads [all cores]; results do not depend on it")
      ->check(whole_number(0, 4096));
  CLI::Option* json = app.add_flag("--json", f.json, "one JSON document on stdout (formats/diff.schema.json)");
  app.add_flag("--markdown", f.markdown, "Markdown, for a comment on a pull request")->excludes(json);
  app.add_flag("-q,--quiet", f.quiet, "no progress");
}

/// The rules of --fail-on. @throws Error{usage} for a rule about a metric that needs a dump if there is none
std::vector<Rule> own_rules(const DiffFlags& flags) {
  std::vector<Rule> own;
  for (const std::string& text : flags.rules) {
    own.push_back(parse_rule(text));
    own.back().demanded = true;
  }
  for (const Rule& rule : own)
    if (find_reading_name(rule.metric)->measured && flags.dumps.empty())
      throw Error{ErrorKind::usage, fmt::format("--fail-on \"{}\": measuring needs --model DUMP.h5", rule.text)};
  if (flags.no_default_rules && own.empty())
    throw Error{ErrorKind::usage, "--no-default-rules leaves no rule", "--fail-on adds one"};
  return own;
}

/// Measures both artifacts on the dump and adds the readings.
void measure(const DiffFlags& flags, Artifact before, Artifact after, DiffReport& report) {
  const Dump dump =
      open_with_hint(flags.dumps, hint_for_dump, [&] { return Dump::open({flags.dumps.begin(), flags.dumps.end()}); });
  const EvalRequest request{
      .layers = {},
      .with_windows = !flags.no_windows,
      .seed = static_cast<std::uint64_t>(flags.seed),
  };
  Progress progress(1.0, flags.quiet || flags.json || flags.markdown);
  MeasuredDiff measured =
      measure_diff(dump, {flags.before, std::move(before)}, {flags.after, std::move(after)}, request,
                   [&](double done, const std::string& what) { progress.update(done, what); });
  report.measured = true;
  report.nothing_coded = measured.nothing_coded;
  auto& readings = report.diff.readings;
  std::move(measured.readings.begin(), measured.readings.end(), std::back_inserter(readings));
}

/// Refuses an output that is one of the input files, and two outputs in one place.
void refuse_overwriting(const DiffFlags& flags) {
  std::vector<std::string> read{flags.before, flags.after};
  read.insert(read.end(), flags.dumps.begin(), flags.dumps.end());
  const auto same = [](const std::string& a, const std::string& b) {
    std::error_code unknown;
    return !a.empty() && (a == b || std::filesystem::equivalent(a, b, unknown));
  };
  for (const auto& [flag, output] : {std::pair{"--junit", &flags.junit}, {"--html", &flags.html}})
    for (const std::string& path : read)
      if (same(*output, path))
        throw Error{ErrorKind::usage, fmt::format("{}: {} is read", flag, *output), "choose another name"};
  if (same(flags.junit, flags.html))
    throw Error{ErrorKind::usage, fmt::format("--junit and --html: both write {}", flags.html), "choose another name"};
}

/// A file that loads. A wrong content hash is a finding of verify_artifact(), so the file is read although the hash is
/// wrong.
struct OpenFile {
  explicit OpenFile(const std::string& path)
      : file(SafetensorsFile::open(path)), artifact(load_artifact(file, HashCheck::left_out)) {}
  SafetensorsFile file;
  Artifact artifact;
};

OpenFile open_artifact(const std::string& path) {
  return open_with_hint({path}, hint_for_artifact, [&] { return OpenFile(path); });
}

DiffReport compare(const DiffFlags& flags, const OpenFile& before, const OpenFile& after) {
  DiffReport report{
      .before = flags.before_name.empty() ? flags.before : flags.before_name,
      .after = flags.after_name.empty() ? flags.after : flags.after_name,
      .sameness = compare_files(before.file, after.file),
      .verified_before = verify_artifact(before.file, before.artifact, parallel_for),
      .verified_after = verify_artifact(after.file, after.artifact, parallel_for),
      .diff = diff_artifacts(before.artifact, after.artifact),
      .checks = {},
      .has_dump = !flags.dumps.empty(),
      .same_data = same_data(before.artifact, after.artifact),
  };
  auto& readings = report.diff.readings;
  const std::vector<Reading> verified = verification_readings(report.verified_before, report.verified_after);
  readings.insert(readings.begin(), verified.begin(), verified.end());
  return report;
}

/// Adds the rule about verification if the rules leave it out and a file is damaged: no choice of rules passes a
/// damaged file.
void demand_sound_files(const DiffReport& report, std::vector<Rule>& rules) {
  constexpr const char* kMetric = "verification";
  const bool named = std::any_of(rules.begin(), rules.end(), [&](const Rule& rule) { return rule.metric == kMetric; });
  const bool damaged =
      std::any_of(report.diff.readings.begin(), report.diff.readings.end(),
                  [&](const Reading& reading) { return reading.metric == kMetric && reading.after > 0.0; });
  if (damaged && !named) rules.push_back(parse_rule("verification<=0"));
}

int diff(const DiffFlags& flags) {
  for (const auto& [flag, output] : {std::pair{"--junit", &flags.junit}, {"--html", &flags.html}})
    if (*output == "-" && (flags.json || flags.markdown))
      throw Error{ErrorKind::usage, fmt::format("{} - takes standard output, and so does --json or --markdown", flag),
                  "name a file for one of them"};
  refuse_overwriting(flags);
  const auto junit = claim_text_output(flags.junit, "kvq-diff"), html = claim_text_output(flags.html, "kvq-diff");
  const ThreadLimit limit(flags.threads);
  const std::vector<Rule> own = own_rules(flags);
  OpenFile before = open_artifact(flags.before), after = open_artifact(flags.after);
  DiffReport report = compare(flags, before, after);
  // An artifact cannot store a dump of another geometry. If geometries differ, the rule about geometry reports it and
  // nothing is measured.
  if (!flags.dumps.empty() && !geometries_differ(report.diff))
    measure(flags, std::move(before.artifact), std::move(after.artifact), report);
  const Evidence evidence{.measured = report.measured, .same_data = report.same_data};
  std::vector<Rule> rules = choose_rules(own, !flags.no_default_rules, evidence);
  demand_sound_files(report, rules);
  report.checks = check_rules(rules, report.diff.readings, report.nothing_coded);
  const int code = report.passed() ? 0 : exit_code(ErrorKind::check_failed);
  if (!flags.junit.empty()) {
    write_text_output(flags.junit, diff_junit(report));
  }
  if (!flags.html.empty()) write_text_output(flags.html, diff_html(report));
  if (flags.junit == "-" || flags.html == "-") return code;
  if (flags.json)
    fmt::print("{}\n", diff_json(report).dump(2));
  else
    fmt::print("{}", flags.markdown ? diff_markdown(report) : diff_text(report, wants_color(STDOUT_FILENO)));
  return code;
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::DiffFlags flags;
  kvq::describe(app, kvq::tool_text());
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-diff", app, argc, argv, [&] { return kvq::diff(flags); });
}
