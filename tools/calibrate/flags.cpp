#include "calibrate/flags.h"

#include "common/describe.h"

#include <kvq/core/error.h>
#include <kvq/plan/golden_rows.h>

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

namespace kvq {

namespace {

std::string method_list() {
  std::string text;
  for (const Method& row : methods()) text += fmt::format("  {:<10} {}\n", row.name, row.summary);
  return text;
}

std::vector<std::string> method_names() {
  std::vector<std::string> names;
  for (const Method& row : methods()) names.push_back(row.name);
  return names;
}

/// Sections below the flags: those of the options, in the order of the table. The first line of a note is its title.
std::vector<TextSection> notes() {
  std::vector<TextSection> sections;
  for (const OptionSpec& row : option_table()) {
    const std::string& note = row.text.notes;
    if (note.empty()) continue;
    const std::size_t end = note.find(":\n");
    sections.push_back(end == std::string::npos ? TextSection{"", note}
                                                : TextSection{note.substr(0, end), note.substr(end + 2)});
  }
  return sections;
}

std::vector<std::string> words_of(const OptionSpec& row) {
  std::vector<std::string> words;
  for (const OptionWord& choice : row.choices) words.push_back(choice.word);
  return words;
}

std::string value_of(const OptionSpec& row) {
  if (!row.text.value.empty()) return row.text.value;
  switch (row.kind) {
    case OptionKind::integer: return "N";
    case OptionKind::number: return "X";
    case OptionKind::text: return row.choices.empty() ? "TEXT" : "NAME";
    case OptionKind::toggle: break;
  }
  return {};
}

template <typename T>
CLI::Option* add_value(CLI::App& app, const OptionSpec& row, GivenOptions& given) {
  const std::string& flag = row.text.flag;
  return app.add_option_function<T>(
                flag, [&given, flag](const T& value) { given.put(flag, value); }, row.text.help)
      ->type_name(value_of(row));
}

CLI::Option* add_row(CLI::App& app, const OptionSpec& row, GivenOptions& given) {
  const std::string& flag = row.text.flag;
  switch (row.kind) {
    case OptionKind::integer: return add_value<std::int64_t>(app, row, given)->check(whole_number());
    case OptionKind::number: return add_value<double>(app, row, given);
    case OptionKind::text: return add_value<std::string>(app, row, given);
    case OptionKind::toggle: break;
  }
  // A configuration file may switch a flag off: CLI11 then counts -1.
  return app.add_flag_function(flag, [&given, flag](std::int64_t count) { given.put(flag, count > 0); }, row.text.help);
}

void add_group(CLI::App& app, const std::string& group, GivenOptions& given) {
  for (const OptionSpec& row : option_table()) {
    if (row.text.group != group) continue;
    CLI::Option* option = add_row(app, row, given)->group(group);
    if (!row.shown_default.empty()) option->default_str(row.shown_default);
  }
}

/// Headings of the table in order, but "Running", where flags of the tool stand first.
std::vector<std::string> option_groups() {
  std::vector<std::string> groups;
  for (const OptionSpec& row : option_table()) {
    const std::string& group = row.text.group;
    if (group != option_group::kRunning && std::find(groups.begin(), groups.end(), group) == groups.end())
      groups.push_back(group);
  }
  return groups;
}

/// Refuses an output file that is also an input, because writing it would destroy the input.
void refuse_overwriting(const CalibrateFlags& f) {
  namespace fs = std::filesystem;
  const auto same = [](const fs::path& a, const fs::path& b) {
    std::error_code unknown;
    return fs::equivalent(a, b, unknown) || fs::weakly_canonical(a, unknown) == fs::weakly_canonical(b, unknown);
  };
  const auto refuse = [](const char* flag, const std::string& file, const char* what) {
    throw Error{ErrorKind::usage, fmt::format("{}: {} is {}", flag, file, what), "choose another name"};
  };
  for (const std::string& dump : f.inputs.dumps) {
    if (!f.outputs.artifact.empty() && same(f.outputs.artifact, dump))
      refuse("--output", f.outputs.artifact, "the dump itself");
    if (!f.inputs.stats.empty() && same(f.inputs.stats, dump)) refuse("--stats", f.inputs.stats, "the dump itself");
  }
  if (f.outputs.artifact.empty() || f.inputs.stats.empty() || !same(f.outputs.artifact, f.inputs.stats)) return;
  refuse("--output", f.outputs.artifact,
         f.inputs.dumps.empty() ? "the file that --stats reads" : "the file that --stats writes");
}

void refuse_without_dump(const CalibrateFlags& f) {
  if (f.inputs.dumps.empty() && f.behavior.queries)
    throw Error{ErrorKind::usage, "--queries chooses queries of a dump: --model is needed",
                "statistics keep the queries that they were collected with"};
  if (f.inputs.dumps.empty() && f.inputs.geometry.empty() && (f.inputs.num_tokens || f.inputs.first_token > 0))
    throw Error{ErrorKind::usage, "--first-token and --num-tokens choose tokens of a dump: --model is needed"};
}

/// --geometry and --predict-for are about predictions only.
void refuse_without_dry_run(const CalibrateFlags& f) {
  const bool has_geometry = !f.inputs.geometry.empty();
  if (!f.behavior.dry_run && (has_geometry || !f.behavior.predict_for.empty()))
    throw Error{ErrorKind::usage,
                fmt::format("{} needs --dry-run: nothing can be calibrated without {}",
                            has_geometry ? "--geometry" : "--predict-for", has_geometry ? "a dump" : "the machine")};
  if (has_geometry && (!f.inputs.dumps.empty() || !f.inputs.layers.empty() || f.inputs.first_token > 0))
    throw Error{ErrorKind::usage,
                "--geometry takes the place of a dump: --model, --layers and --first-token contradict it"};
  if (has_geometry && !f.inputs.num_tokens)
    throw Error{ErrorKind::usage, "--geometry has no tokens: --num-tokens N is needed"};
  if (!f.behavior.predict_for.empty() && f.behavior.device != Behavior{}.device)
    throw Error{ErrorKind::usage, "--predict-for and --device: expected one of both"};
}

/// --stats-only ends before a decision, so flags of what a decision writes and prints contradict it.
void refuse_with_stats_only(const CalibrateFlags& f) {
  if (!f.behavior.stats_only) return;
  if (f.inputs.dumps.empty() || f.inputs.stats.empty())
    throw Error{ErrorKind::usage, "--stats-only collects a dump into a file: --model and --stats FILE are needed"};
  const std::pair<const char*, bool> given[] = {
      {"--output", !f.outputs.artifact.empty()},
      {"--report-rotations", f.outputs.report_rotations},
      {"--report-ablation", f.outputs.report_ablation},
      {"--report-outliers", f.outputs.report_outliers},
  };
  for (const auto& [flag, is_given] : given)
    if (is_given)
      throw Error{ErrorKind::usage, fmt::format("--stats-only decides nothing, so {} has no meaning", flag),
                  "kvq-calibrate --stats FILE --output FILE decides from the statistics"};
}

void add_input_flags(CLI::App& app, Inputs& inputs, Outputs& outputs, Behavior& behavior) {
  const std::string in = "Input and output";
  app.add_option("dump,-m,--model", inputs.dumps,
                 "dump of activations (formats/dump.md), with or without --model; may be given several times")
      ->type_name("FILE")
      ->group(in);
  app.add_option("-o,--output", outputs.artifact,
                 "artifact to write [<dump stem>.<method>.safetensors beside the dump]")
      ->type_name("FILE")
      ->group(in);
  app.add_option("--stats", inputs.stats, "with a dump: write the collected statistics here; without: decide from them")
      ->type_name("FILE")
      ->group(in);
  app.add_flag("--stats-only", behavior.stats_only,
               "with a dump: collect what the method needs into --stats FILE, decide nothing")
      ->group(in);
  app.add_option("--merge-stats", inputs.merge_stats, "join statistics files into --stats FILE")
      ->expected(1, -1)
      ->type_name("FILE")
      ->group(in);
  app.add_option("--layers", inputs.layers, "only these layers, such as 0-3,7")->type_name("LIST")->group(in);
  app.add_option("--first-token", inputs.first_token, "start at this token of the dump")
      ->check(whole_number(0, std::int64_t{1} << 40))
      ->capture_default_str()
      ->group(in);
  app.add_option("--num-tokens", inputs.num_tokens, "use this many tokens [all that follow]")
      ->check(whole_number(1, std::int64_t{1} << 40))
      ->type_name("N")
      ->group(in);
  app.add_flag("--resume", behavior.resume,
               "continue an interrupted run: layers already collected are taken from <output>.parts")
      ->group(in);
  app.add_flag("--dry-run", behavior.dry_run, "predict memory, time and artifact size, write nothing")->group(in);
  app.add_option("--geometry", inputs.geometry,
                 "with --dry-run and --num-tokens, in place of a dump: layers=N,q-heads=N,kv-heads=N,head-dim=N")
      ->type_name("LIST")
      ->group(in);
  app.add_option("--predict-for", behavior.predict_for,
                 "with --dry-run, another machine than this one: cpu:CORES[:GFLOPS of each], h200 or h200:GPUS")
      ->type_name("NAME")
      ->group(in);
}

void add_budget_flags(CLI::App& app, Outputs& outputs, Behavior& behavior) {
  app.add_option("--held-out-tokens", behavior.held_out_tokens,
                 "tokens kept out of all statistics, to compare plans on")
      ->check(whole_number(0, std::int64_t{1} << 20))
      ->default_str(std::to_string(kHeldOutTokens))
      ->type_name("N")
      ->group(option_group::kBudgets);
  app.add_flag(
         "--report-ablation", outputs.report_ablation,
         "block-gtq, kvq: also print bytes, errors and kernels of both targets; kvq: what each ingredient brings, too")
      ->group(option_group::kBudgets);
}

void add_running_flags(CLI::App& app, GivenOptions& given, Outputs& outputs, Behavior& behavior) {
  app.add_option("--threads", behavior.threads, "threads [all cores]; results do not depend on it")
      ->check(whole_number(0, 4096))
      ->group(option_group::kRunning);
  app.add_option("--device", behavior.device,
                 "what computes: cpu, cuda (all GPUs), cuda:LIST, or auto, which takes GPUs if there are any")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(option_group::kRunning);
  app.add_option("--mem-limit", behavior.mem_limit,
                 "memory to take on each GPU, such as 4GB or 512MiB; no result depends on it [90% of what is free]")
      ->type_name("SIZE")
      ->group(option_group::kRunning);
  add_group(app, option_group::kRunning, given);
  app.add_option("--sample-tokens", behavior.sample_tokens,
                 "tokens a layer kept for clip and sign search, k-means and fitted codebooks")
      ->check(whole_number(16, 1 << 24))
      ->capture_default_str()
      ->group(option_group::kRunning);
  app.add_option("--golden-tokens", behavior.golden_tokens,
                 "tokens a layer kept with their codes, for self-tests of runtimes; 0 = none")
      ->check(whole_number(0, kMostGoldenTokens))
      ->capture_default_str()
      ->group(option_group::kRunning);
  app.add_option("--collect", behavior.collect,
                 "also collect these moments: query key value scored_value scored_query sst, or all")
      ->type_name("NAME")
      ->group(option_group::kRunning);
  app.add_option("--queries", behavior.queries,
                 "whose queries count in statistics: all, generated (decode-time) or prompt; needs /generated [all]")
      ->type_name("NAME")
      ->group(option_group::kRunning);
  app.add_option("--context", outputs.context, "context length of the effective bits in the table")
      ->check(whole_number(1, std::int64_t{1} << 30))
      ->capture_default_str()
      ->group(option_group::kRunning);
  app.add_flag("--report-rotations", outputs.report_rotations, "also print OSCAR Table 10 and Figure 7 for each layer")
      ->group(option_group::kRunning);
  app.add_flag("--report-outliers", outputs.report_outliers,
               "also print the outlier gain of each head, whatever the transform")
      ->group(option_group::kRunning);
  app.add_flag("--json", outputs.json, "one JSON document on stdout")->group(option_group::kRunning);
  app.add_flag("-q,--quiet", outputs.quiet, "no progress, no table")->group(option_group::kRunning);
}

}  // namespace

ToolText calibrate_text() {
  ToolText text{
      .name = "kvq-calibrate",
      .summary = "calibrates a low-bit KV cache from the activations of a model",
      .description =
          "Reads dumped queries, keys and values and writes a calibration artifact: for each layer and KV head the "
          "rotations, clip ratios, centers and codes that a low-bit KV cache is stored with. scripts/dump_qkv.py makes "
          "a dump of a Hugging Face model.",
      .examples = {{"kvq-calibrate dump.h5", "OSCAR, INT2"},
                   {"kvq-calibrate dump.h5 --method saw-int4", "INT4"},
                   {"kvq-calibrate dump.h5 --config recipe.toml", "flags of a file"},
                   {"kvq-calibrate dump.h5 --dry-run", "predicts time and size"},
                   {"kvq-calibrate --stats s.safetensors -o b.safetensors", "no dump"}},
      .first_flags = {"--model", "--output", "--method", "--bits", "--budget-bits", "--exact-layers", "--stats",
                      "--dry-run", "--resume", "--threads"},
      .short_sections = {{"Methods (--method)", method_list()}},
      .sections = {{"Methods", method_list()}},
      .words = {{"--method", method_names()},
                {"--clip", {"search", "none"}},
                {"--queries", {"all", "generated", "prompt"}},
                {"--device", {"auto", "cpu", "cuda"}},
                {"--collect", {"query", "key", "value", "scored_value", "scored_query", "sst", "all"}}},
  };
  for (TextSection& note : notes()) text.sections.push_back(std::move(note));
  for (const OptionSpec& row : option_table())
    if (!row.choices.empty()) text.words[row.text.flag] = words_of(row);
  return text;
}

void add_flags(CLI::App& app, CalibrateFlags& f) {
  add_input_flags(app, f.inputs, f.outputs, f.behavior);
  app.add_option("--method", f.method, "how codes are decided: see Methods below")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(option_group::kStorage);
  for (const std::string& group : option_groups()) add_group(app, group, f.given);
  add_budget_flags(app, f.outputs, f.behavior);
  add_running_flags(app, f.given, f.outputs, f.behavior);
}

Options resolve_options(const CalibrateFlags& f) {
  const Method& method = find_method(f.method);
  if (f.outputs.report_ablation && !method.ablate)
    refuse_flag("--report-ablation", method, [](const Method& row) { return row.ablate != nullptr; });
  Options options = resolve_options(method, f.given);
  refuse_with_stats_only(f);
  refuse_overwriting(f);
  refuse_without_dump(f);
  refuse_without_dry_run(f);
  return options;
}

bool concerns_process(const CalibrateFlags& f) {
  const Outputs& out = f.outputs;
  return !out.artifact.empty() || !f.inputs.stats.empty() || !f.inputs.merge_stats.empty() || f.behavior.resume ||
         f.behavior.dry_run || f.behavior.stats_only || f.behavior.threads != 0 ||
         f.behavior.device != Behavior{}.device || !f.behavior.mem_limit.empty() || !f.behavior.predict_for.empty() ||
         !f.inputs.geometry.empty() || out.json || out.report_ablation || out.report_outliers || out.report_rotations;
}

std::filesystem::path resolve_output(const CalibrateFlags& f) {
  if (f.behavior.stats_only) return f.inputs.stats;
  if (!f.outputs.artifact.empty()) return f.outputs.artifact;
  if (f.inputs.dumps.empty()) throw Error{ErrorKind::usage, "--output is needed when there is no --model"};
  std::filesystem::path path = f.inputs.dumps.front();
  return path.replace_extension(fmt::format(".{}.safetensors", f.method));
}

}  // namespace kvq
