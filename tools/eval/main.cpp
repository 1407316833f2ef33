#include "common/cli.h"
#include "common/describe.h"
#include "common/plural.h"
#include "common/progress.h"
#include "common/say.h"
#include "common/temporary_folder.h"
#include "common/wrong_file.h"
#include "eval/csv.h"
#include "eval/notes.h"
#include "eval/report.h"
#include "eval/sweep.h"

#include <kvq/compute/parallel.h>
#include <kvq/container/output_claim.h>
#include <kvq/container/output_target.h>
#include <kvq/container/temporaries.h>
#include <kvq/core/error.h>
#include <kvq/dump/dump_file.h>
#include <kvq/eval/rope_logit_error.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>

namespace kvq {

namespace {

constexpr std::int64_t kContext = 32768;

struct EvalFlags {
  std::vector<std::string> dumps, artifacts, schemes;
  std::string metric, layers, sweep, keep;
  std::vector<std::string> calibrations;
  std::int64_t pairs = 2048, seed = 0;
  std::optional<std::int64_t> context;
  int threads = 0;
  bool no_windows = false, by_context = false, rotations = false, json = false, csv = false, quiet = false;
};

std::string scheme_list() {
  std::string text;
  for (const SchemeFamily& family : scheme_families())
    text += fmt::format("  {:<19} {}\n", family.pattern, family.summary);
  return text;
}

std::string metric_list() {
  std::string text;
  for (const Metric metric : all_metrics()) text += fmt::format("  {:<16} {}\n", metric->name, metric->summary);
  return text;
}

std::vector<std::string> metric_names() {
  std::vector<std::string> names;
  for (const Metric metric : all_metrics()) names.emplace_back(metric->name);
  return names;
}

ToolText eval_text() {
  return {
      .name = "kvq-eval",
      .summary = "measures what codes of a KV cache do to attention",
      .description = "Measures on a held-out dump what calibration artifacts and built-in schemes do to attention.",
      .examples = {{"kvq-eval --model heldout.h5 a.safetensors b.safetensors", "all metrics, b against a"},
                   {"kvq-eval --model heldout.h5 a.safetensors --scheme kivi-2",
                    "beside a scheme that needs no artifact"},
                   {"kvq-eval --model heldout.h5 a.safetensors --metric attention_kl", "layer by layer"},
                   {"kvq-eval --model heldout.h5 a.safetensors --json", "everything, also by KV head and context"},
                   {"kvq-eval --model heldout.h5 --calibration dump.h5 --sweep grid.json",
                    "a grid of methods; scripts/sweeps has those of the papers"}},
      .first_flags = {"--model", "--artifact", "--scheme", "--metric", "--no-windows", "--by-context", "--layers",
                      "--context", "--threads", "--json"},
      .sections = {{"Schemes (<b>: 1 to 8 bits; the suffix -k leaves values exact)", scheme_list()},
                   {"Metrics (formats/eval.md)", metric_list()},
                   {"Reading the tables",
                    "Every query reads codes where the artifact's windows have no exact token. Each line of the last "
                    "table is a change against the first candidate, with a 95% bootstrap interval over layers and KV "
                    "heads."}},
      .words = {{"--scheme", scheme_names()}, {"--metric", metric_names()}},
  };
}

void add_flags(CLI::App& app, EvalFlags& f) {
  app.add_option("artifacts,--artifact", f.artifacts,
                 "artifact files; later ones, and schemes, are compared with the first")
      ->type_name("FILE");
  app.add_option("--scheme", f.schemes, "built-in scheme, see below; may be given several times")
      ->type_name("NAME")
      ->allow_extra_args(false);
  app.add_option("-m,--model", f.dumps, "held-out dump (formats/dump.md); may be given several times")
      ->required()
      ->type_name("FILE")
      ->allow_extra_args(false);
  app.add_option("--metric", f.metric, "print this one layer by layer; rope_logit_mae alone is quick")
      ->type_name("NAME");
  app.add_flag("--by-context", f.by_context, "also print the KL by the context that queries have");
  app.add_flag("--rotations", f.rotations, "also print the columns of OSCAR Table 10");
  app.add_flag("--no-windows", f.no_windows,
               "every key and value is read as codes, also those of sink and recent tokens");
  app.add_option("--context", f.context,
                 "context length of the effective bits [32768; in a sweep the longest sequence]")
      ->type_name("N")
      ->check(whole_number(1, std::int64_t{1} << 30));
  app.add_option("--layers", f.layers, "only these layers, such as 0-3,7")->type_name("LIST");
  app.add_option("--pairs", f.pairs, "rope_logit_mae: most pairs of a query and a key token, for each query head")
      ->check(whole_number(1, std::int64_t{1} << 24))
      ->capture_default_str();
  app.add_option("--seed", f.seed, "of pairs, random rotations of schemes and bootstrap samples")
      ->check(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->capture_default_str();
  app.add_option("--threads", f.threads, "threads [all cores]; results do not depend on it")
      ->check(whole_number(0, 4096));
  CLI::Option* json = app.add_flag("--json", f.json, "one JSON document on stdout");
  app.add_flag("--csv", f.csv, "the table as CSV with all digits; of --metric, --by-context and --rotations that one")
      ->excludes(json);
  app.add_flag("-q,--quiet", f.quiet, "no progress");
  const std::string sweeps = "Sweeps";
  app.add_option("--sweep", f.sweep,
                 "calibrate and measure a grid of methods and options (formats/eval.md); scripts/sweeps has those of "
                 "the papers")
      ->type_name("FILE")
      ->group(sweeps);
  app.add_option("--calibration", f.calibrations,
                 "dump to calibrate the rows on, as FILE or NAME=FILE (formats/eval.md); several are one more axis")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->group(sweeps);
  app.add_option("--keep", f.keep, "leave the artifacts of all rows in this folder")
      ->type_name("FOLDER")
      ->group(sweeps);
}

std::vector<int> choose_layers(const ModelGeometry& model, const std::string& text) {
  std::vector<int> all;
  all.reserve(model.layers.size());
  for (const LayerEntry& entry : model.layers) all.push_back(entry.layer);
  if (text.empty()) return all;
  const std::vector<int> wanted = parse_int_list(text, "--layers");
  for (const int layer : wanted)
    if (!std::binary_search(all.begin(), all.end(), layer))
      throw Error{ErrorKind::usage, fmt::format("--layers: layer {} is not there (the dump has {}, {} to {})", layer,
                                                counted(all.size(), "layer"), all.front(), all.back())};
  return wanted;
}

void print_json(const EvalFlags& flags, const Dump& dump, const EvalRequest& request, Json json) {
  json["tool"] = "kvq-eval " KVQ_VERSION;
  json["dump"] = {{"files", flags.dumps},
                  {"model", dump.model().name},
                  {"fingerprint", dump.model().fingerprint},
                  {"tokens", dump.num_tokens()},
                  {"sequences", dump.num_sequences()}};
  json["settings"] = {{"windows", request.with_windows},
                      {"context", request.context},
                      {"pairs", std::min(request.pairs, dump.num_tokens())},
                      {"seed", request.seed},
                      {"rope_offsets", rope_offsets()}};
  fmt::print("{}\n", json.dump(2));
}

std::vector<CandidateResult> evaluate_with_progress(const EvalFlags& flags, const Dump& dump,
                                                    std::vector<Candidate>& candidates, const EvalRequest& request) {
  Progress progress(1.0, flags.quiet || flags.json || flags.csv);
  return evaluate(dump, candidates, request,
                  [&](double done, const std::string& what) { progress.update(done, what); });
}

/// Prints why errors are 0, if exact windows make them so.
void explain_zeros(const EvalRequest& request, const std::vector<CandidateResult>& results) {
  const auto has_codes = [](const LayerResult& layer) { return layer.k_code_bits < 16.0 || layer.v_code_bits < 16.0; };
  const auto is_hidden = [&](const CandidateResult& own) {
    return std::any_of(own.layers.begin(), own.layers.end(), has_codes) && own.mean[Metric("k_rel_mse")] == 0.0 &&
           own.mean[Metric("logit_rel_mse")] == 0.0;
  };
  if (request.with_windows && std::any_of(results.begin(), results.end(), is_hidden))
    fmt::print("0 means that exact windows hold whole sequences of this dump: see --no-windows.\n");
}

/// Makes and claims the folder of --keep. @throws Error{usage, io}
std::optional<OutputClaim> claim_folder(const std::string& keep) {
  if (keep.empty()) return std::nullopt;
  make_output_folder(keep);
  return OutputClaim::of_folder(keep, "kvq-eval");
}

/// Prints the one table that the flags name.
void print_csv(const EvalFlags& flags, Metric metric, const std::vector<Candidate>& candidates,
               const std::vector<CandidateResult>& results) {
  if (flags.rotations)
    fmt::print("{}", rotations_csv(candidates, results));
  else if (flags.by_context)
    fmt::print("{}", context_csv(Metric("attention_kl"), candidates, results));
  else
    fmt::print("{}", flags.metric.empty() ? summary_csv(candidates, results) : layer_csv(metric, candidates, results));
}

int evaluate_sweep(const EvalFlags& flags, const Dump& dump, EvalRequest request) {
  if (!flags.artifacts.empty() || !flags.metric.empty() || flags.by_context || flags.rotations)
    throw Error{ErrorKind::usage, "--sweep goes without artifacts, --metric, --by-context and --rotations"};
  Sweep sweep = load_sweep(flags.sweep, flags.calibrations);
  sweep.schemes.insert(sweep.schemes.end(), flags.schemes.begin(), flags.schemes.end());
  check_sweep(sweep, dump.model(), request.layers);
  request.with_context =
      std::any_of(sweep.metrics.begin(), sweep.metrics.end(), [](Metric metric) { return metric->on_request; });
  const auto kept = claim_folder(flags.keep);
  const ScratchFolder temporary(temporary_prefix("kvq-sweep"));
  const SweepFolders folders{
      .artifacts = kept ? kept->path() : temporary.path() / "artifacts",
      .statistics = temporary.path() / "statistics",
      .artifacts_stay = kept.has_value(),
  };
  for (const auto& folder : {folders.artifacts, folders.statistics}) std::filesystem::create_directories(folder);
  std::vector<Candidate> candidates =
      calibrate_sweep(sweep, folders, flags.threads, flags.quiet || flags.json || flags.csv);
  const std::vector<CandidateResult> results = evaluate_with_progress(flags, dump, candidates, request);
  const std::vector<EvalNote> notes = notes_of(dump.model(), request, candidates, results);
  if (!flags.json) say(notes_text(notes));
  if (flags.csv) {
    fmt::print("{}", sweep_csv(sweep, candidates, results));
    return 0;
  }
  if (!flags.json) {
    fmt::print("{}", sweep_table(sweep, candidates, results));
    explain_zeros(request, results);
    return 0;
  }
  Json json = evaluation_json(candidates, results, compare_all(results, request.seed));
  json["notes"] = notes_json(notes);
  add_sweep(sweep, candidates, results, json);
  print_json(flags, dump, request, std::move(json));
  return 0;
}

int evaluate_files(const EvalFlags& flags) {
  const ThreadLimit limit(flags.threads);
  const bool by_layer = !flags.metric.empty();
  const Metric metric = by_layer ? find_metric(flags.metric) : Metric("output_rel_mse");
  const Dump dump =
      open_with_hint(flags.dumps, hint_for_dump, [&] { return Dump::open({flags.dumps.begin(), flags.dumps.end()}); });
  const EvalRequest request{
      .layers = choose_layers(dump.model(), flags.layers),
      .with_windows = !flags.no_windows,
      .with_attention = !by_layer || metric->source != MetricSource::rope_logits || flags.by_context,
      .with_context = by_layer && metric->on_request,
      .rotations = flags.rotations,
      .pairs = flags.pairs,
      .context = flags.context.value_or(flags.sweep.empty() ? kContext : dump.longest_sequence()),
      .seed = static_cast<std::uint64_t>(flags.seed),
  };
  if (flags.csv && (by_layer ? 1 : 0) + (flags.by_context ? 1 : 0) + (flags.rotations ? 1 : 0) > 1)
    throw Error{ErrorKind::usage, "--csv prints one table: give one of --metric, --by-context and --rotations"};
  if (flags.sweep.empty() && (!flags.calibrations.empty() || !flags.keep.empty()))
    throw Error{ErrorKind::usage, "--calibration and --keep belong to --sweep"};
  if (!flags.sweep.empty()) return evaluate_sweep(flags, dump, request);
  if (flags.artifacts.empty() && flags.schemes.empty())
    throw Error{ErrorKind::usage, "an artifact or --scheme is needed", "see kvq-eval --help"};
  std::vector<Candidate> candidates = open_with_hint(flags.artifacts, hint_for_artifact,
                                                     [&] { return load_candidates(flags.artifacts, flags.schemes); });
  for (const Candidate& candidate : candidates)
    if (candidate.artifact) check_model(candidate, dump.model(), request.layers);
  const std::vector<CandidateResult> results = evaluate_with_progress(flags, dump, candidates, request);
  const std::vector<Comparison> comparisons = compare_all(results, request.seed);
  const std::vector<EvalNote> notes = notes_of(dump.model(), request, candidates, results);
  if (!flags.json) say(notes_text(notes));
  if (flags.json) {
    Json json = evaluation_json(candidates, results, comparisons);
    json["notes"] = notes_json(notes);
    print_json(flags, dump, request, std::move(json));
    return 0;
  }
  if (flags.csv) {
    print_csv(flags, metric, candidates, results);
    return 0;
  }
  fmt::print("{}",
             by_layer ? layer_table(metric, candidates, results) : summary_tables(candidates, results, comparisons));
  if (flags.rotations) fmt::print("\n{}", rotation_columns_table(candidates, results));
  explain_zeros(request, results);
  if (flags.by_context) fmt::print("\n{}", context_table(Metric("attention_kl"), candidates, results));
  return 0;
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::EvalFlags flags;
  kvq::describe(app, kvq::eval_text());
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-eval", app, argc, argv, [&] { return kvq::evaluate_files(flags); });
}
