#include "calibrate/program.h"

#include "calibrate/ablation.h"
#include "calibrate/device.h"
#include "calibrate/outliers.h"
#include "calibrate/outputs.h"
#include "calibrate/predict.h"
#include "calibrate/report.h"
#include "calibrate/run.h"
#include "common/plural.h"
#include "common/process.h"
#include "common/progress.h"
#include "common/say.h"
#include "common/table.h"
#include "common/wrong_file.h"
#include "inspect/verdict.h"

#include <kvq/compute/parallel.h>
#include <kvq/core/byte_size.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/methods/data_size.h>
#include <kvq/methods/rotated_plan.h>

#include <fmt/format.h>

#include <filesystem>
#include <optional>

namespace kvq {

namespace fs = std::filesystem;

namespace {

std::vector<int> wanted_layers(const Inputs& inputs) {
  return inputs.layers.empty() ? std::vector<int>{} : parse_int_list(inputs.layers, "--layers");
}

/// What --dry-run predicts for.
struct Predicted {
  PredictedInput input;
  std::string subject;  ///< for people
  fs::path output;      ///< empty without a dump
};

/// A dump, which is read and checked as a run does.
Predicted checked_dump(const CalibrateFlags& flags, const Options& options, const StatsRequest& request) {
  const fs::path output = resolve_output(flags);
  check_outputs(flags, output);
  const Dump dump = open_dump(flags.inputs);
  check_layers(options, dump.model());
  const auto layers = choose_layers(dump.model(), wanted_layers(flags.inputs));
  for (const LayerEntry& layer : layers) dump.check_layer(layer.layer);
  check_queries(request, flags.inputs, dump);
  const std::int64_t tokens = chosen_tokens(flags.inputs, dump).count;
  const std::string of = tokens < dump.num_tokens() ? fmt::format(" (of {})", dump.num_tokens()) : "";
  return {input_of(dump, layers, tokens),
          fmt::format("{}, {}{} in {}; would write {}", counted(layers.size(), "layer"), counted(tokens, "token"), of,
                      counted(dump.num_sequences(), "sequence"), safe_line(output.string())),
          output};
}

/// Layers that --geometry describes.
Predicted given_geometry(const CalibrateFlags& flags, const Options& options) {
  check_tokens(*flags.inputs.num_tokens);
  Predicted predicted{input_of_geometry(flags.inputs.geometry, *flags.inputs.num_tokens), {}, {}};
  const PredictedInput& input = predicted.input;
  ModelGeometry model;
  model.layers = input.layers;
  check_layers(options, model);
  predicted.subject = fmt::format("{}, {} in {}; no dump", counted(input.layers.size(), "layer"),
                                  counted(input.tokens, "token"), counted(input.sequences, "sequence"));
  return predicted;
}

int dry_run(const CalibrateFlags& flags, const Options& options, const PredictedMachine& machine) {
  if (flags.inputs.dumps.empty() && flags.inputs.geometry.empty())
    throw Error{ErrorKind::usage, "--dry-run predicts the reading of a dump: --model is needed"};
  const StatsRequest request = make_request(flags.behavior, options);
  const Predicted predicted =
      flags.inputs.dumps.empty() ? given_geometry(flags, options) : checked_dump(flags, options, request);
  const bool decides = !flags.behavior.stats_only;
  const Prediction p = predict(predicted.input, request, options, machine, flags.behavior.threads, decides);
  if (flags.outputs.json) {
    Json json{{"schema_version", "1.0"},
              {"tool", "kvq-calibrate " KVQ_VERSION},
              {"layers", predicted.input.layers.size()},
              {"tokens", predicted.input.tokens},
              {"threads", p.threads},
              {"device", machine.name},
              {"devices", machine.devices},
              {"gemm_gflops", p.gemm_gflops},
              {"read_bytes", p.read_bytes},
              {"collect_flops", p.collect_flops},
              {"seconds", p.seconds},
              {"start_seconds", p.start_seconds},
              {"collect_seconds", p.collect_seconds},
              {"decide_seconds", p.decide_seconds},
              {"peak_bytes", p.peak_bytes},
              {"device_bytes", p.device_bytes},
              {"artifact_bytes", p.artifact_bytes}};
    if (!predicted.output.empty()) json["output"] = utf8_text(predicted.output.string());
    fmt::print("{}\n", json.dump(2));
    return 0;
  }
  fmt::print("{}\n", predicted.subject);
  if (machine.devices == 0)
    fmt::print("time      about {} on {} threads ({:.0f} GFLOP/s{})\n", format_seconds(p.seconds), p.threads,
               p.gemm_gflops,
               machine.core_gflops > 0.0 ? ""
               : machine.cores > 0       ? ", from a core of this machine now"
                                         : ", measured now");
  else
    fmt::print("time      about {} on {} and {} threads (rates of an H200)\n", format_seconds(p.seconds), machine.name,
               p.threads);
  fmt::print("memory    about {} at the peak\n", format_bytes(p.peak_bytes));
  if (machine.devices > 0) fmt::print("device    about {} of memory on each GPU\n", format_bytes(p.device_bytes));
  if (decides) fmt::print("artifact  about {}\n", format_bytes(p.artifact_bytes));
  return 0;
}

/// The machine that --predict-for names, or this one.
PredictedMachine predicted_machine(const Behavior& behavior, const ChosenBackend& chosen, std::int64_t memory_limit) {
  PredictedMachine machine = behavior.predict_for.empty() ? PredictedMachine{} : parse_machine(behavior.predict_for);
  if (chosen.owned) machine.name = chosen.get().name(), machine.devices = chosen.num_devices;
  if (machine.devices > 0) machine.memory_limit = memory_limit;
  return machine;
}

std::vector<LayerRotationReport> report_all(const StatsOrigin& origin, Scope scope) {
  constexpr int kTable10GroupSize = 64;
  std::vector<LayerRotationReport> reports;
  reports.reserve(origin.size());
  for (std::size_t i = 0; i < origin.size(); ++i)
    reports.push_back(report_rotations(*origin.load(i), scope, kTable10GroupSize));
  return reports;
}

void print_results(const Outputs& outputs, const StatsOrigin& origin, const Options& options, const Artifact& artifact,
                   const fs::path& output, Backend& backend) {
  const Ablation ablation =
      outputs.report_ablation ? find_method(options.method).ablate(origin, options, backend) : Ablation{};
  const auto reports =
      outputs.report_rotations ? report_all(origin, options.scope) : std::vector<LayerRotationReport>{};
  const auto outliers = outputs.report_outliers ? find_outliers(origin, options) : std::vector<LayerOutliers>{};
  const std::string few =
      too_few_tokens(origin.header.model, artifact.calibration.tokens, !artifact.calibration.budget.is_null());
  if (!outputs.quiet) {
    if (!few.empty() && !outputs.json) say(fmt::format("kvq-calibrate: warning: {}\n", few));
    say(layout_warning(artifact));
    say(centroid_advice(artifact));
    say(transform_advice(origin, artifact, options));
  }
  if (outputs.json) {
    Json json = calibrate_json(artifact, output, outputs.context);
    json["device"] = backend.name();
    json["device_bytes"] = backend.device_bytes();
    json["warnings"] = few.empty() ? Json::array() : Json::array({few});
    if (outputs.report_rotations) json["rotations"] = rotation_json(reports);
    if (outputs.report_outliers) json["outliers"] = outlier_json(outliers);
    if (outputs.report_ablation) {
      json["ablation"] = ingredients_json(ablation.ingredients);
      json["targets"] = targets_json(ablation.targets);
    }
    fmt::print("{}\n", json.dump(2));
    return;
  }
  if (!outputs.quiet) {
    fmt::print("{}", closing_table(artifact, outputs.context));
    fmt::print("wrote {} ({}), computed on {}\n", safe_line(output.string()),
               format_bytes(static_cast<double>(fs::file_size(output))), backend.name());
    for (const LayerPlan& layer : artifact.layers)
      if (!layer.v)
        fmt::print("layer {} has no values in the dump ({}): only its keys are planned\n", layer.layer,
                   to_string(layer.geometry.kind));
    fmt::print("\n{}", verdict_text(artifact, verdict_of(artifact, output, outputs.context)));
  }
  if (outputs.report_rotations) fmt::print("\n{}", rotation_table(reports, options.scope));
  if (outputs.report_outliers) fmt::print("\n{}", outlier_table(outliers));
  if (outputs.report_ablation) fmt::print("\n{}", ablation_text(ablation));
}

bool says_nothing(const CalibrateFlags& flags) { return flags.outputs.quiet || flags.outputs.json; }

/// @param claim  of the artifact
Artifact decide_and_save(const CalibrateFlags& flags, const StatsOrigin& origin, const Options& options,
                         const OutputClaim& claim, Backend& backend) {
  Artifact artifact = decide(origin, flags.behavior.golden_tokens, options, says_nothing(flags), backend);
  save_artifact(artifact, claim.path());
  return artifact;
}

/// Merges statistics files and decides from statistics, each if the flags say so.
void calibrate_statistics(const CalibrateFlags& flags, const Options& options, const std::vector<int>& wanted,
                          Backend& backend) {
  const auto stats_claim = claim_stats(flags);
  std::optional<OutputClaim> claim;
  const bool only_merges = !flags.inputs.merge_stats.empty() && flags.outputs.artifact.empty();
  const fs::path output = only_merges ? fs::path() : resolve_output(flags);
  if (!only_merges) claim.emplace(OutputClaim::of_file(output, "kvq-calibrate"));
  if (!flags.inputs.merge_stats.empty())
    merge_stats_files({flags.inputs.merge_stats.begin(), flags.inputs.merge_stats.end()}, flags.inputs.stats,
                      [](const std::string& text) { say(fmt::format("kvq-calibrate: warning: {}\n", text)); });
  if (only_merges) return;
  check_layers(options, StatsFile::open(flags.inputs.stats).header().model);
  const StatsOrigin origin = open_stats(flags.inputs.stats, wanted);
  const Artifact artifact = decide_and_save(flags, origin, options, *claim, backend);
  print_results(flags.outputs, origin, options, artifact, output, backend);
}

void say_parts(const CalibrateFlags& flags, const PartsFolder& parts) {
  if (says_nothing(flags) || flags.behavior.resume || parts.num_parts() == 0) return;
  say(fmt::format("note: {} has {} of an unfinished run; with --resume this run would take them over\n",
                  parts.path().string(), counted(parts.num_parts(), "layer")));
}

/// Collects into the parts, and joins them in the file of --stats if there is one.
StatsOrigin collect_dump(const CalibrateFlags& flags, const Dump& dump, const CollectRequest& request,
                         const PartsFolder& parts, const std::optional<OutputClaim>& stats, const CollectDump& collect,
                         Backend& backend) {
  check_disk_space(request, parts, stats ? stats->path() : fs::path());
  StatsOrigin origin = collect(dump, request, parts, flags.behavior.resume, says_nothing(flags), backend);
  if (stats) merge_parts(origin, stats->path());
  return origin;
}

/// Runs `work`, which collects into the parts. If `work` fails or the process is interrupted, the message says how to
/// go on with the parts that are collected.
template <typename Work>
void with_parts(const CalibrateFlags& flags, const PartsFolder& parts, Work work) {
  say_parts(flags, parts);
  set_interruption_advice("; the same command with --resume continues");
  try {
    work();
  } catch (...) {
    rethrow_with_parts(parts);
  }
  set_interruption_advice("");
}

/// --stats-only.
void collect_only(const CalibrateFlags& flags, const Options& options, const CollectDump& collect, Backend& backend) {
  const Dump dump = open_dump(flags.inputs);
  const CollectRequest request = checked_request(flags, options, dump);
  const auto claim = claim_stats(flags);
  const PartsFolder parts(claim->path().string() + ".parts");
  with_parts(flags, parts, [&] { collect_dump(flags, dump, request, parts, claim, collect, backend); });
  const RemoveParts at_end(parts, flags.outputs.quiet);
  const std::string file = claim->path().string();
  if (flags.outputs.json)
    fmt::print("{}\n", Json{{"schema_version", "1.0"},
                            {"tool", "kvq-calibrate " KVQ_VERSION},
                            {"stats", utf8_text(file)},
                            {"layers", request.layers.size()},
                            {"tokens", request.tokens.count},
                            {"device", backend.name()},
                            {"device_bytes", backend.device_bytes()}}
                           .dump(2));
  else if (!flags.outputs.quiet)
    fmt::print(
        "wrote {} ({}), computed on {}: statistics of {}, {}\nnext: kvq-calibrate --stats {} --output ARTIFACT\n",
        safe_line(file), format_bytes(static_cast<double>(fs::file_size(file))), backend.name(),
        counted(request.layers.size(), "layer"), counted(request.tokens.count, "token"), safe_line(file));
}

void calibrate_dump(const CalibrateFlags& flags, const Options& options, const CollectDump& collect, Backend& backend) {
  const fs::path output = resolve_output(flags);
  const Dump dump = open_dump(flags.inputs);
  const CollectRequest request = checked_request(flags, options, dump);
  const OutputClaim claim = OutputClaim::of_file(output, "kvq-calibrate");
  const auto stats_claim = claim_stats(flags);
  const PartsFolder parts(claim.path().string() + ".parts");
  StatsOrigin origin;
  Artifact artifact;
  with_parts(flags, parts, [&] {
    origin = collect_dump(flags, dump, request, parts, stats_claim, collect, backend);
    artifact = decide_and_save(flags, origin, options, claim, backend);
  });
  const RemoveParts at_end(parts, flags.outputs.quiet);
  print_results(flags.outputs, origin, options, artifact, output, backend);
}

}  // namespace

Dump open_dump(const Inputs& inputs) {
  return open_with_hint(inputs.dumps, hint_for_dump,
                        [&] { return Dump::open({inputs.dumps.begin(), inputs.dumps.end()}); });
}

CollectRequest checked_request(const CalibrateFlags& flags, const Options& options, const Dump& dump) {
  check_layers(options, dump.model());
  CollectRequest request{choose_layers(dump.model(), wanted_layers(flags.inputs)),
                         make_request(flags.behavior, options), chosen_tokens(flags.inputs, dump)};
  check_queries(request.stats, flags.inputs, dump);
  return request;
}

int calibrate(const CalibrateFlags& flags, const CollectDump& collect) {
  const ThreadLimit limit(flags.behavior.threads);
  const Options options = resolve_options(flags);
  const Inputs& inputs = flags.inputs;
  const std::vector<int> wanted = wanted_layers(inputs);
  if (!inputs.merge_stats.empty() && (!inputs.dumps.empty() || inputs.stats.empty()))
    throw Error{ErrorKind::usage, "--merge-stats joins files into --stats FILE, without --model"};
  if (inputs.dumps.empty() && inputs.stats.empty() && inputs.geometry.empty())
    throw Error{ErrorKind::usage, "--model DUMP.h5 is needed (or --stats FILE to decide from statistics)",
                "see kvq-calibrate --help"};
  const Behavior& behavior = flags.behavior;
  const std::int64_t memory_limit = behavior.mem_limit.empty() ? 0 : parse_byte_size(behavior.mem_limit, "--mem-limit");
  const DeviceChoice device = parse_device(behavior.device);
  const ChosenBackend chosen = behavior.predict_for.empty() ? choose_backend(device, memory_limit) : ChosenBackend{};
  if (behavior.dry_run) return dry_run(flags, options, predicted_machine(behavior, chosen, memory_limit));
  if (inputs.dumps.empty())
    calibrate_statistics(flags, options, wanted, chosen.get());
  else if (flags.behavior.stats_only)
    collect_only(flags, options, collect, chosen.get());
  else
    calibrate_dump(flags, options, collect, chosen.get());
  return 0;
}

}  // namespace kvq
