#include "common/cli.h"
#include "common/progress.h"
#include "common/version.h"
#include "diff/report.h"

#include <kvq/compute/parallel.h>
#include <kvq/container/atomic_file.h>
#include <kvq/core/error.h>
#include <kvq/diff/measured_readings.h>
#include <kvq/dump/dump_file.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <span>

namespace kvq {

namespace {

struct DiffFlags {
  std::string before, after, before_name, after_name, junit;
  std::vector<std::string> dumps, rules;
  bool no_default_rules = false, no_windows = false, json = false, markdown = false, quiet = false;
  int threads = 0;
  std::int64_t seed = 0;
};

std::string rule_list() {
  std::string text;
  std::size_t width = 0;
  for (const DefaultRule& row : default_rules()) {
    const std::string rule = fmt::format("{}{}", row.text, row.follows_data ? " +" : "");
    text += width == 0 || width + rule.size() + 2 > 78 ? "\n  " : "  ";
    width = (text.ends_with("\n  ") ? 0 : width) + rule.size() + 2;
    text += rule;
  }
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
    if (!row.summary.empty()) text += fmt::format("\n  {:<28} {}{}", row.name, row.summary, row.measured ? " *" : "");
  for (const Metric metric : all_metrics())
    if (metric->per_query)
      text += fmt::format("\n  {:<28} {} of {} *", fmt::format("{}.<part>", metric->name), part_list(),
                          metric->query_summary);
  return text;
}

void add_flags(CLI::App& app, DiffFlags& f) {
  app.description(
      "Compares two calibration artifacts of a model, and fails where the new one is worse than rules allow.\n\n"
      "  kvq-diff old.safetensors new.safetensors                      what the files say\n"
      "  kvq-diff old.safetensors new.safetensors --model heldout.h5   and what they do to attention\n"
      "  kvq-diff old.safetensors new.safetensors --model heldout.h5 --fail-on 'attention_kl.p99<=+5%' --junit "
      "diff.xml");
  app.footer("Metrics (* needs --model; formats/eval.md):" + metric_list() +
             "\nlayers.<metric> and heads.<metric> are those of each layer and KV head; a rule holds for all of "
             "them.\n\nDefault rules:" +
             rule_list() +
             "\n+ only if both artifacts come from the same data, or nothing is measured: other text moves these\n"
             "distances as much as damage does, so measured rules judge a calibration on other text.\n\n"
             "A limit is absolute, or with % against the old value. Exit code: 0 passed, 6 a rule failed.");
  app.set_version_flag("--version", version_line("kvq-diff"));
  app.add_option("old", f.before, "artifact to compare with")->required();
  app.add_option("new", f.after, "artifact to judge")->required();
  app.add_option("-m,--model", f.dumps, "held-out dump to measure both on; may be given several times")
      ->allow_extra_args(false);
  app.add_option("--fail-on", f.rules, "rule, in place of the default ones of its metric; may be given several times")
      ->allow_extra_args(false);
  app.add_flag("--no-default-rules", f.no_default_rules, "only the rules given with --fail-on");
  app.add_flag("--no-windows", f.no_windows, "measure every token as codes, also those of sink and recent windows");
  app.add_option("--junit", f.junit, "also write the checks as JUnit XML to this file");
  app.add_option("--old-name", f.before_name, "name of OLD in reports [its path]");
  app.add_option("--new-name", f.after_name, "name of NEW in reports [its path]");
  app.add_option("--seed", f.seed, "of pairs of tokens")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 62))
      ->capture_default_str();
  app.add_option("--threads", f.threads, "threads [all cores]; results do not depend on it")
      ->check(CLI::Range(0, 4096));
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
  const Dump dump = Dump::open({flags.dumps.begin(), flags.dumps.end()});
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

/// Refuses --junit if it names one of the input files.
void refuse_overwriting(const DiffFlags& flags) {
  std::vector<std::string> read{flags.before, flags.after};
  read.insert(read.end(), flags.dumps.begin(), flags.dumps.end());
  for (const std::string& path : read) {
    std::error_code unknown;
    if (!flags.junit.empty() && std::filesystem::equivalent(path, flags.junit, unknown))
      throw Error{ErrorKind::usage, fmt::format("--junit: {} is read", flags.junit), "choose another name"};
  }
}

int diff(const DiffFlags& flags) {
  refuse_overwriting(flags);
  const ThreadLimit limit(flags.threads);
  const std::vector<Rule> own = own_rules(flags);
  Artifact before = load_artifact(flags.before), after = load_artifact(flags.after);
  DiffReport report{
      .before = flags.before_name.empty() ? flags.before : flags.before_name,
      .after = flags.after_name.empty() ? flags.after : flags.after_name,
      .diff = diff_artifacts(before, after),
      .checks = {},
      .same_data = same_data(before, after),
  };
  // An artifact cannot store a dump of another geometry. If geometries differ, the rule about geometry reports it and
  // nothing is measured.
  if (!flags.dumps.empty() && !geometries_differ(report.diff))
    measure(flags, std::move(before), std::move(after), report);
  const Evidence evidence{.measured = report.measured, .same_data = report.same_data};
  const std::vector<Rule> rules = choose_rules(own, !flags.no_default_rules, evidence);
  report.checks = check_rules(rules, report.diff.readings, report.nothing_coded);
  if (!flags.junit.empty()) {
    const std::string xml = diff_junit(report);
    AtomicFile file(flags.junit);
    file.write(std::as_bytes(std::span(xml)));
    file.commit();
  }
  if (flags.json)
    fmt::print("{}\n", diff_json(report).dump(2));
  else
    fmt::print("{}", flags.markdown ? diff_markdown(report) : diff_text(report));
  return report.passed() ? 0 : exit_code(ErrorKind::check_failed);
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::DiffFlags flags;
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-diff", app, argc, argv, [&] { return kvq::diff(flags); });
}
