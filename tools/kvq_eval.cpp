#include "cli.h"
#include "progress.h"
#include "table.h"

#include <kvq/artifact/artifact.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/dump/dump_file.h>
#include <kvq/eval/rope_logit_error.h>
#include <kvq/eval/scheme.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>

namespace kvq {

namespace {

struct EvalFlags {
  std::vector<std::string> dumps, artifacts, schemes;
  std::string metric = "rope-logit-mae";
  std::string layers;
  std::int64_t pairs = 2048, seed = 0;
  int threads = 0;
  bool json = false, quiet = false;
};

/// An artifact or a scheme to compare; errors are relative to the first.
struct Candidate {
  std::string name;  ///< column header
  std::string path;
  std::optional<Artifact> artifact;
  std::optional<Scheme> scheme;
  const LayerPlan* find(int layer) const {
    const auto it = std::find_if(artifact->layers.begin(), artifact->layers.end(), [&](const LayerPlan& plan) { return plan.layer == layer; });
    return it == artifact->layers.end() ? nullptr : &*it;
  }
  std::unique_ptr<StoredSide> keys(const LayerGeometry& geometry, int layer, std::uint64_t seed) const {
    return scheme ? scheme->of_layer(geometry, layer, seed).k : stored_by_plan(find(layer)->k, geometry.head_dim, artifact->windows);
  }
};

/// One layer: an entry for each candidate.
struct LayerResult {
  int layer = 0;
  std::vector<RopeLogitMae> mae;
  std::vector<double> code_bits;  ///< of a key element
};

/// One candidate over all layers.
struct Summary {
  double mean = 0.0;            ///< over layers
  std::optional<double> change; ///< of the mean against the first candidate's; nothing if that is 0
  int wins = 0;                 ///< layers with less error than the first
  double code_bits = 0.0;       ///< of a key element, mean over layers
};

/// A row for each metric. A new one is a row of kMetrics and a group of flags of its own.
struct Metric {
  const char *name, *summary;
  int (*run)(const EvalFlags&);
};
const Metric& find_metric(const std::string& name);
std::string metric_list();

std::string scheme_list() {
  std::string text;
  for (const SchemeFamily& family : scheme_families()) text += fmt::format("\n  {:<19} {}", family.pattern, family.summary);
  return text;
}

void add_flags(CLI::App& app, EvalFlags& f) {
  app.description(
      "Measures on a held-out dump what calibration artifacts do to attention, layer by layer.\n\n"
      "  kvq-eval --model heldout.h5 a.safetensors                  the error of one\n"
      "  kvq-eval --model heldout.h5 a.safetensors b.safetensors    and how b changes it; negative is less error\n"
      "  kvq-eval --model heldout.h5 a.safetensors --json           everything, also by KV head");
  app.footer("Schemes (<b>: 1 to 8 bits; the suffix -k leaves values exact):" + scheme_list() + "\n\nMetrics:" + metric_list() +
             "\n\nrope-logit-mae is Block-GTQ's (Appendix B.3): the mean of |q^T R_D (k - k_hat)| over KV heads, their query heads,\n"
             "pairs of tokens and 50 offsets D from -1024 to 1024, q and k before RoPE. These are raw logits, without the\n"
             "softmax scale, as in the paper. Keys only; every key counts as coded, also those that windows keep exact.");
  app.set_version_flag("--version", "kvq " KVQ_VERSION);
  app.add_option("artifacts,--artifact", f.artifacts, "artifact files; later ones, and schemes, are compared with the first");
  app.add_option("--scheme", f.schemes, "built-in scheme to compare with, see below; may be given several times")->allow_extra_args(false);
  app.add_option("-m,--model", f.dumps, "held-out dump (formats/dump.md); may be given several times")->required()->allow_extra_args(false);
  app.add_option("--metric", f.metric, "what to measure, see below")->capture_default_str();
  app.add_option("--layers", f.layers, "only these layers, such as 0-3,7");
  app.add_option("--threads", f.threads, "threads [all cores]; results do not depend on it")->check(CLI::Range(0, 4096));
  app.add_flag("--json", f.json, "one JSON document on stdout");
  app.add_flag("-q,--quiet", f.quiet, "no progress");

  const std::string mae = "rope-logit-mae";
  app.add_option("--pairs", f.pairs, "most pairs of a query and a key token, for each query head")->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))->capture_default_str()->group(mae);
  app.add_option("--seed", f.seed, "another seed pairs each query with another key")->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()))->capture_default_str()->group(mae);
}

std::vector<int> choose_layers(const ModelGeometry& model, const std::string& text) {
  std::vector<int> all;
  for (const LayerEntry& entry : model.layers) all.push_back(entry.layer);
  if (text.empty()) return all;
  const std::vector<int> wanted = parse_int_list(text, "--layers");
  for (const int layer : wanted)
    if (!std::binary_search(all.begin(), all.end(), layer))
      throw Error{ErrorKind::usage, fmt::format("--layers: layer {} is not there (the dump has {} layers, {} to {})", layer, all.size(), all.front(), all.back())};
  return wanted;
}

/// Named by their file stems, or by their paths where two stems are equal.
std::vector<Candidate> load_candidates(const std::vector<std::string>& paths, const std::vector<std::string>& schemes) {
  if (paths.empty() && schemes.empty()) throw Error{ErrorKind::usage, "an artifact or --scheme is needed", "see kvq-eval --help"};
  const auto stem = [](const std::string& path) { return std::filesystem::path(path).stem().string(); };
  std::vector<Candidate> candidates;
  for (const std::string& path : paths) {
    const bool unique = std::count_if(paths.begin(), paths.end(), [&](const std::string& other) { return stem(other) == stem(path); }) == 1;
    candidates.push_back({unique ? stem(path) : path, path, load_artifact(path), {}});
  }
  for (const std::string& name : schemes) candidates.push_back({name, {}, {}, find_scheme(name)});
  return candidates;
}

[[noreturn]] void refuse(const Candidate& candidate, const std::string& what, const std::string& hint = {}) {
  throw Error{ErrorKind::bad_input, fmt::format("{}: {}", candidate.path, what), hint};
}

template <typename T>
void expect_same(const Candidate& candidate, int layer, const char* what, const T& in_artifact, const T& in_dump) {
  if (in_artifact != in_dump) refuse(candidate, fmt::format("layer {} {}: {}, but the dump has {}", layer, what, in_artifact, in_dump));
}

/// What the metric rests on; the softmax scale and the window do not enter.
void check_geometry(const Candidate& candidate, int layer, const LayerGeometry& a, const LayerGeometry& d) {
  expect_same(candidate, layer, "num_q_heads", a.num_q_heads, d.num_q_heads);
  expect_same(candidate, layer, "num_kv_heads", a.num_kv_heads, d.num_kv_heads);
  expect_same(candidate, layer, "head_dim", a.head_dim, d.head_dim);
  expect_same<std::string>(candidate, layer, "kind", to_string(a.kind), to_string(d.kind));
  expect_same<std::string>(candidate, layer, "rope layout", to_string(a.rope.layout), to_string(d.rope.layout));
  expect_same(candidate, layer, "rotary_dim", a.rope.dim, d.rope.dim);
  expect_same(candidate, layer, "rotary_offset", a.rope.offset, d.rope.offset);
  expect_same(candidate, layer, "rope_attention_factor", a.rope.attention_factor, d.rope.attention_factor);
  for (std::size_t j = 0; j < a.rope.inv_freq.size(); ++j)
    expect_same(candidate, layer, fmt::format("rope_inv_freq[{}]", j).c_str(), a.rope.inv_freq[j], d.rope.inv_freq[j]);
}

/// @throws Error{bad_input} for the first thing that shows that the artifact was not made for the dump's model
void check_model(const Candidate& candidate, const ModelGeometry& model, const std::vector<int>& layers) {
  const ModelGeometry& own = candidate.artifact->model;
  if (!own.fingerprint.empty() && !model.fingerprint.empty() && own.fingerprint != model.fingerprint)
    refuse(candidate, fmt::format("of another model ({}, fingerprint {}; the dump: {}, {})", printable(own.name, 40), printable(own.fingerprint, 12),
                                  printable(model.name, 40), printable(model.fingerprint, 12)));
  if (own.num_layers != model.num_layers) refuse(candidate, fmt::format("of a model of {} layers, but the dump's has {}", own.num_layers, model.num_layers));
  for (const LayerEntry& entry : model.layers) {
    if (!std::binary_search(layers.begin(), layers.end(), entry.layer)) continue;
    const LayerPlan* plan = candidate.find(entry.layer);
    if (plan == nullptr) refuse(candidate, fmt::format("has no layer {}, but the dump has", entry.layer), "--layers names the layers to compare");
    check_geometry(candidate, entry.layer, plan->geometry, entry.geometry);
  }
}

std::vector<LayerResult> measure(const Dump& dump, const std::vector<int>& layers, const std::vector<Candidate>& candidates, const EvalFlags& flags) {
  Progress progress(static_cast<double>(layers.size() * candidates.size()), flags.quiet || flags.json);
  double done = 0.0;
  std::vector<LayerResult> results;
  for (const int layer : layers) {
    const auto say = [&] { progress.update(done, fmt::format("layer {} ({}/{})", layer, results.size() + 1, layers.size())); };
    say();
    const LayerActivations activations = dump.load_layer(layer);
    const RopeLogitError error(activations, {.pairs = flags.pairs, .seed = static_cast<std::uint64_t>(flags.seed)});
    LayerResult result{layer, {}, {}};
    for (const Candidate& candidate : candidates) {
      const auto keys = candidate.keys(activations.geometry, layer, static_cast<std::uint64_t>(flags.seed));
      result.mae.push_back(error.of_stored(activations, *keys));
      result.code_bits.push_back(keys->code_bits());
      done += 1.0;
      say();
    }
    results.push_back(std::move(result));
  }
  return results;
}

/// b / a - 1.
std::optional<double> relative_change(double a, double b) { return a > 0.0 ? std::optional(b / a - 1.0) : std::nullopt; }

std::vector<Summary> summarise(const std::vector<LayerResult>& results, const std::vector<Candidate>& candidates) {
  std::vector<Summary> summaries;
  const auto layers = static_cast<double>(results.size());
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    Summary summary;
    for (const LayerResult& result : results) {
      summary.mean += result.mae[c].mean;
      summary.code_bits += result.code_bits[c];
      summary.wins += result.mae[c].mean < result.mae[0].mean ? 1 : 0;
    }
    summary.mean /= layers;
    summary.code_bits /= layers;
    summary.change = relative_change(c == 0 ? summary.mean : summaries[0].mean, summary.mean);
    summaries.push_back(summary);
  }
  return summaries;
}

std::string percent(const std::optional<double>& change) { return change ? fmt::format("{:+.1f}%", 100.0 * *change) : "-"; }

std::string table(const std::vector<LayerResult>& results, const std::vector<Candidate>& candidates, const std::vector<Summary>& summaries) {
  std::vector<std::string> header{"layer"}, mean{"mean"}, bits{"bits"};
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    header.push_back(printable(candidates[c].name, 200));
    mean.push_back(fmt::format("{:.4f}", summaries[c].mean));
    bits.push_back(fmt::format("{:.2f}", summaries[c].code_bits));
    if (c == 0) continue;
    header.push_back("change");
    mean.push_back(percent(summaries[c].change));
    bits.push_back("");
  }
  std::vector<std::vector<std::string>> rows{header};
  for (const LayerResult& result : results) {
    std::vector<std::string> row{std::to_string(result.layer)};
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      row.push_back(fmt::format("{:.4f}", result.mae[c].mean));
      if (c > 0) row.push_back(percent(relative_change(result.mae[0].mean, result.mae[c].mean)));
    }
    rows.push_back(row);
  }
  rows.push_back(mean);
  rows.push_back(bits);
  return format_table(rows, std::string(header.size(), 'r'));
}

void print_table(const std::vector<LayerResult>& results, const std::vector<Candidate>& candidates, const std::vector<Summary>& summaries) {
  fmt::print("{}", table(results, candidates, summaries));
  for (std::size_t c = 1; c < candidates.size(); ++c)
    fmt::print("{} wins {}/{} layers against {}\n", printable(candidates[c].name, 200), summaries[c].wins, results.size(), printable(candidates[0].name, 200));
}

Json change_json(const std::optional<double>& change) { return change ? Json(*change) : Json(); }

Json layers_json(const std::vector<LayerResult>& results) {
  Json layers = Json::array();
  for (const LayerResult& result : results) {
    Json entries = Json::array();
    for (std::size_t c = 0; c < result.mae.size(); ++c) {
      Json entry = {{"mae", result.mae[c].mean}, {"kv_head", result.mae[c].kv_head}};
      if (c > 0) entry["change"] = change_json(relative_change(result.mae[0].mean, result.mae[c].mean));
      entries.push_back(entry);
    }
    layers.push_back({{"layer", result.layer}, {"results", entries}});
  }
  return layers;
}

Json artifacts_json(const std::vector<Candidate>& candidates, const std::vector<Summary>& summaries, std::size_t layers) {
  Json artifacts = Json::array();
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    Json entry = {{"name", candidates[c].name}, {"key_code_bits", summaries[c].code_bits}, {"mean", summaries[c].mean}};
    if (candidates[c].artifact) entry.update({{"path", candidates[c].path}, {"method", candidates[c].artifact->calibration.method}});
    if (c > 0) entry.update({{"change", change_json(summaries[c].change)}, {"wins", summaries[c].wins}, {"layers", layers}});
    artifacts.push_back(entry);
  }
  return artifacts;
}

void print_json(const EvalFlags& flags, const Dump& dump, const std::vector<LayerResult>& results, const std::vector<Candidate>& candidates,
                const std::vector<Summary>& summaries) {
  const Json json = {{"schema_version", "1.0"}, {"tool", "kvq-eval " KVQ_VERSION}, {"metric", flags.metric},
                     {"model", {{"name", dump.model().name}, {"fingerprint", dump.model().fingerprint}}}, {"dumps", flags.dumps},
                     {"tokens", dump.num_tokens()}, {"pairs", std::min(flags.pairs, dump.num_tokens())}, {"seed", flags.seed}, {"offsets", rope_offsets()},
                     {"artifacts", artifacts_json(candidates, summaries, results.size())}, {"layers", layers_json(results)}};
  fmt::print("{}\n", json.dump(2));
}

int rope_logit_mae(const EvalFlags& flags) {
  const ThreadLimit limit(flags.threads);
  const Dump dump = Dump::open({flags.dumps.begin(), flags.dumps.end()});
  const std::vector<int> layers = choose_layers(dump.model(), flags.layers);
  const std::vector<Candidate> candidates = load_candidates(flags.artifacts, flags.schemes);
  for (const Candidate& candidate : candidates)
    if (candidate.artifact) check_model(candidate, dump.model(), layers);
  const std::vector<LayerResult> results = measure(dump, layers, candidates, flags);
  const std::vector<Summary> summaries = summarise(results, candidates);
  if (flags.json)
    print_json(flags, dump, results, candidates, summaries);
  else
    print_table(results, candidates, summaries);
  return 0;
}

constexpr Metric kMetrics[] = {{"rope-logit-mae", "mean absolute error of the attention logits that coded keys cause", rope_logit_mae}};

const Metric& find_metric(const std::string& name) {
  std::string names;
  for (const Metric& metric : kMetrics) {
    if (name == metric.name) return metric;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", metric.name);
  }
  throw Error{ErrorKind::usage, fmt::format("--metric: unknown \"{}\"", name), "choose one of " + names};
}

std::string metric_list() {
  std::string text;
  for (const Metric& metric : kMetrics) text += fmt::format("\n  {:<16} {}", metric.name, metric.summary);
  return text;
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::EvalFlags flags;
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-eval", app, argc, argv, [&] { return kvq::find_metric(flags.metric).run(flags); });
}
