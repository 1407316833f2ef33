#include "calibrate/collect.h"
#include "calibrate/flags.h"
#include "calibrate/outliers.h"
#include "calibrate/predict.h"
#include "calibrate/report.h"
#include "calibrate/run.h"
#include "common/cli.h"
#include "common/progress.h"
#include "common/table.h"

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/methods/rotated_plan.h>

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

namespace kvq {

namespace {

namespace fs = std::filesystem;

extern "C" void say_interrupted(int) {
  // A signal handler may call only async-signal-safe functions. All outputs are written under temporary names and
  // renamed, so _exit() leaves no half-written file.
  constexpr char text[] = "\nkvq-calibrate: interrupted; the same command with --resume continues\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, sizeof text - 1);
  _exit(130);
}

int dry_run(const CalibrateFlags& flags, const Options& options, const fs::path& output) {
  if (flags.inputs.dumps.empty())
    throw Error{ErrorKind::usage, "--dry-run predicts the reading of a dump: --model is needed"};
  const Dump dump = Dump::open({flags.inputs.dumps.begin(), flags.inputs.dumps.end()});
  const auto layers = choose_layers(
      dump.model(), flags.inputs.layers.empty() ? std::vector<int>{} : parse_int_list(flags.inputs.layers, "--layers"));
  const Prediction p = predict(dump, layers, make_request(flags.behavior, options), options,
                               chosen_tokens(flags.inputs, dump).count, flags.behavior.threads);
  if (flags.outputs.json) {
    fmt::print("{}\n", Json{{"schema_version", "1.0"},
                            {"tool", "kvq-calibrate " KVQ_VERSION},
                            {"output", output.string()},
                            {"layers", layers.size()},
                            {"tokens", chosen_tokens(flags.inputs, dump).count},
                            {"threads", p.threads},
                            {"gemm_gflops", p.gemm_gflops},
                            {"seconds", p.seconds},
                            {"peak_bytes", p.peak_bytes},
                            {"artifact_bytes", p.artifact_bytes}}
                           .dump(2));
    return 0;
  }
  const std::int64_t tokens = chosen_tokens(flags.inputs, dump).count;
  const std::string of = tokens < dump.num_tokens() ? fmt::format(" (of {})", dump.num_tokens()) : "";
  fmt::print("{} layers, {} tokens{} in {} sequences; would write {}\n", layers.size(), tokens, of,
             dump.num_sequences(), output.string());
  fmt::print("time      about {} on {} threads ({:.0f} GFLOP/s, measured now)\n", format_seconds(p.seconds), p.threads,
             p.gemm_gflops);
  fmt::print("memory    about {} at the peak\nartifact  about {}\n", format_bytes(p.peak_bytes),
             format_bytes(p.artifact_bytes));
  return 0;
}

std::vector<LayerRotationReport> report_all(const StatsOrigin& origin) {
  constexpr int kTable10GroupSize = 64;
  std::vector<LayerRotationReport> reports;
  reports.reserve(origin.size());
  for (std::size_t i = 0; i < origin.size(); ++i)
    reports.push_back(report_rotations(*origin.load(i), kTable10GroupSize));
  return reports;
}

void print_results(const Outputs& outputs, const StatsOrigin& origin, const Options& options, const Artifact& artifact,
                   const fs::path& output) {
  const auto ablations =
      outputs.report_ablation ? find_method(options.method).ablate(origin, options) : std::vector<AblationRow>{};
  const auto reports = outputs.report_rotations ? report_all(origin) : std::vector<LayerRotationReport>{};
  const auto outliers = outputs.report_outliers ? find_outliers(origin, options) : std::vector<LayerOutliers>{};
  if (!outputs.quiet) fmt::print(stderr, "{}{}", layout_warning(artifact), transform_advice(origin, artifact, options));
  if (outputs.json) {
    Json json = calibrate_json(artifact, output, outputs.context);
    if (outputs.report_rotations) json["rotations"] = rotation_json(reports);
    if (outputs.report_outliers) json["outliers"] = outlier_json(outliers);
    if (outputs.report_ablation) json["ablation"] = ablation_json(ablations);
    fmt::print("{}\n", json.dump(2));
    return;
  }
  if (!outputs.quiet) {
    fmt::print("{}", closing_table(artifact, outputs.context));
    fmt::print("wrote {} ({})\n", output.string(), format_bytes(static_cast<double>(fs::file_size(output))));
    for (const LayerPlan& layer : artifact.layers)
      if (!layer.v)
        fmt::print("layer {} has no values in the dump ({}): only its keys are planned\n", layer.layer,
                   to_string(layer.geometry.kind));
  }
  if (outputs.report_rotations) fmt::print("\n{}", rotation_table(reports));
  if (outputs.report_outliers) fmt::print("\n{}", outlier_table(outliers));
  if (outputs.report_ablation) fmt::print("\n{}", ablation_table(ablations));
}

void write_artifact(const CalibrateFlags& flags, const StatsOrigin& origin, const Options& options,
                    const fs::path& output) {
  const Artifact artifact =
      decide(origin, flags.behavior.golden_tokens, options, flags.outputs.quiet || flags.outputs.json);
  save_artifact(artifact, output);
  print_results(flags.outputs, origin, options, artifact, output);
}

int calibrate(const CalibrateFlags& flags) {
  const ThreadLimit limit(flags.behavior.threads);
  const Options options = resolve_options(flags);
  const std::vector<int> wanted =
      flags.inputs.layers.empty() ? std::vector<int>{} : parse_int_list(flags.inputs.layers, "--layers");
  if (!flags.inputs.merge_stats.empty()) {
    if (!flags.inputs.dumps.empty() || flags.inputs.stats.empty())
      throw Error{ErrorKind::usage, "--merge-stats joins files into --stats FILE, without --model"};
    merge_stats_files({flags.inputs.merge_stats.begin(), flags.inputs.merge_stats.end()}, flags.inputs.stats);
    if (flags.outputs.artifact.empty()) return 0;
  }
  if (flags.inputs.dumps.empty() && flags.inputs.stats.empty())
    throw Error{ErrorKind::usage, "--model DUMP.h5 is needed (or --stats FILE to decide from statistics)",
                "see kvq-calibrate --help"};
  const fs::path output = resolve_output(flags);
  if (flags.behavior.dry_run) return dry_run(flags, options, output);
  if (flags.inputs.dumps.empty()) {
    check_exact_layers(options, StatsFile::open(flags.inputs.stats).header().model);
    write_artifact(flags, open_stats(flags.inputs.stats, wanted), options, output);
    return 0;
  }

  const Dump dump = Dump::open({flags.inputs.dumps.begin(), flags.inputs.dumps.end()});
  check_exact_layers(options, dump.model());
  const StatsRequest request = make_request(flags.behavior, options);
  const fs::path folder = output.string() + ".parts";
  std::signal(SIGINT, say_interrupted);
  std::signal(SIGTERM, say_interrupted);
  try {
    const StatsOrigin origin =
        collect_with_progress(dump, {choose_layers(dump.model(), wanted), request, chosen_tokens(flags.inputs, dump)},
                              folder, flags.behavior.resume, flags.outputs.quiet || flags.outputs.json);
    if (!flags.inputs.stats.empty()) {
      std::vector<fs::path> shards;
      shards.reserve(origin.entries.size());
      for (const auto& entry : origin.entries) shards.push_back(entry.path);
      merge_stats_files(shards, flags.inputs.stats);
    }
    write_artifact(flags, origin, options, output);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);  // an error, unlike an interruption, leaves no shards behind
    throw;
  }
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return 0;
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::CalibrateFlags flags;
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-calibrate", app, argc, argv, [&] { return kvq::calibrate(flags); });
}
