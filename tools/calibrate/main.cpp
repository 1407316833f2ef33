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
  if (flags.dumps.empty()) throw Error{ErrorKind::usage, "--dry-run predicts the reading of a dump: --model is needed"};
  const Dump dump = Dump::open({flags.dumps.begin(), flags.dumps.end()});
  const auto layers =
      choose_layers(dump.model(), flags.layers.empty() ? std::vector<int>{} : parse_int_list(flags.layers, "--layers"));
  const Prediction p =
      predict(dump, layers, make_request(flags, options), options, chosen_tokens(flags, dump).count, flags.threads);
  if (flags.json) {
    fmt::print("{}\n", Json{{"schema_version", "1.0"},
                            {"tool", "kvq-calibrate " KVQ_VERSION},
                            {"output", output.string()},
                            {"layers", layers.size()},
                            {"tokens", chosen_tokens(flags, dump).count},
                            {"threads", p.threads},
                            {"gemm_gflops", p.gemm_gflops},
                            {"seconds", p.seconds},
                            {"peak_bytes", p.peak_bytes},
                            {"artifact_bytes", p.artifact_bytes}}
                           .dump(2));
    return 0;
  }
  const std::int64_t tokens = chosen_tokens(flags, dump).count;
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
  for (std::size_t i = 0; i < origin.size(); ++i)
    reports.push_back(report_rotations(*origin.load(i), kTable10GroupSize));
  return reports;
}

void print_results(const CalibrateFlags& flags, const StatsOrigin& origin, const Options& options,
                   const Artifact& artifact, const fs::path& output) {
  const auto ablations = flags.report_ablation ? ablate(origin, options) : std::vector<AblationRow>{};
  const auto reports = flags.report_rotations ? report_all(origin) : std::vector<LayerRotationReport>{};
  const auto outliers = flags.report_outliers ? find_outliers(origin, options) : std::vector<LayerOutliers>{};
  if (!flags.quiet) fmt::print(stderr, "{}", transform_advice(origin, artifact, options));
  if (flags.json) {
    Json json = calibrate_json(artifact, output, flags.context);
    if (flags.report_rotations) json["rotations"] = rotation_json(reports);
    if (flags.report_outliers) json["outliers"] = outlier_json(outliers);
    if (flags.report_ablation) json["ablation"] = ablation_json(ablations);
    fmt::print("{}\n", json.dump(2));
    return;
  }
  if (!flags.quiet) {
    fmt::print("{}", closing_table(artifact, flags.context));
    fmt::print("wrote {} ({})\n", output.string(), format_bytes(static_cast<double>(fs::file_size(output))));
    for (const LayerPlan& layer : artifact.layers)
      if (!layer.v)
        fmt::print("layer {} has no values in the dump ({}): only its keys are planned\n", layer.layer,
                   to_string(layer.geometry.kind));
  }
  if (flags.report_rotations) fmt::print("\n{}", rotation_table(reports));
  if (flags.report_outliers) fmt::print("\n{}", outlier_table(outliers));
  if (flags.report_ablation) fmt::print("\n{}", ablation_table(ablations));
}

void write_artifact(const CalibrateFlags& flags, const StatsOrigin& origin, const Options& options,
                    const fs::path& output) {
  const Artifact artifact = decide(origin, flags, options, flags.quiet || flags.json);
  save_artifact(artifact, output);
  print_results(flags, origin, options, artifact, output);
}

int calibrate(const CalibrateFlags& flags) {
  const ThreadLimit limit(flags.threads);
  const Options options = resolve_options(flags);
  const std::vector<int> wanted = flags.layers.empty() ? std::vector<int>{} : parse_int_list(flags.layers, "--layers");
  if (!flags.merge_stats.empty()) {
    if (!flags.dumps.empty() || flags.stats.empty())
      throw Error{ErrorKind::usage, "--merge-stats joins files into --stats FILE, without --model"};
    merge_stats_files({flags.merge_stats.begin(), flags.merge_stats.end()}, flags.stats);
    if (flags.output.empty()) return 0;
  }
  if (flags.dumps.empty() && flags.stats.empty())
    throw Error{ErrorKind::usage, "--model DUMP.h5 is needed (or --stats FILE to decide from statistics)",
                "see kvq-calibrate --help"};
  const fs::path output = resolve_output(flags);
  if (flags.dry_run) return dry_run(flags, options, output);
  if (flags.dumps.empty()) {
    check_exact_layers(options, StatsFile::open(flags.stats).header().model);
    write_artifact(flags, open_stats(flags.stats, wanted), options, output);
    return 0;
  }

  const Dump dump = Dump::open({flags.dumps.begin(), flags.dumps.end()});
  check_exact_layers(options, dump.model());
  const StatsRequest request = make_request(flags, options);
  const fs::path folder = output.string() + ".parts";
  std::signal(SIGINT, say_interrupted);
  std::signal(SIGTERM, say_interrupted);
  try {
    const StatsOrigin origin =
        collect_with_progress(dump, {choose_layers(dump.model(), wanted), request, chosen_tokens(flags, dump)}, folder,
                              flags.resume, flags.quiet || flags.json);
    if (!flags.stats.empty()) {
      std::vector<fs::path> shards;
      for (const auto& entry : origin.entries) shards.push_back(entry.path);
      merge_stats_files(shards, flags.stats);
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
  return kvq::run_tool("kvq-calibrate", app, argc, argv, [&] {
    flags.given = kvq::given_flags(app);
    return kvq::calibrate(flags);
  });
}
