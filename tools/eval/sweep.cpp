#include "eval/sweep.h"

#include "calibrate/run.h"
#include "common/decimal.h"
#include "common/flag_error.h"
#include "common/progress.h"
#include "common/table.h"
#include "eval/report.h"
#include "inspect/compare.h"

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/core/text.h>
#include <kvq/eval/comparison.h>

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

namespace kvq {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMostRows = 4096;
constexpr Metric kOutput{"output_rel_mse"}, kKl{"attention_kl"};
constexpr std::uintmax_t kLargestFile = 1u << 20;

using Row = Sweep::Row;

/// A row's name from its flags: "--method oscar --bits 2" becomes "method oscar bits 2".
std::string label_of(const std::string& flags) {
  std::istringstream words(flags);
  std::string label;
  for (std::string word; words >> word;) {
    if (word.starts_with("--")) word.erase(0, 2);
    label += (label.empty() ? "" : " ") + word;
  }
  return label;
}

class SweepReader {
 public:
  explicit SweepReader(const fs::path& path) : path_(path.string()) {
    std::error_code failed;
    const std::uintmax_t size = fs::file_size(path, failed);
    if (failed) throw Error{ErrorKind::io, fmt::format("{}: cannot read: {}", path_, failed.message())};
    if (size > kLargestFile) refuse("", fmt::format("at most {} bytes", kLargestFile), fmt::format("{}", size));
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    json_ = parse_json(text.str(), path_);
    if (!json_.is_object()) refuse("", "an object", json_.type_name());
    for (const auto& [key, value] : json_.items())
      if (key != "title" && key != "flags" && key != "axes" && key != "rows" && key != "schemes" && key != "metrics")
        refuse("", "title, flags, axes, rows, schemes, metrics", printable(key, 40));
  }

  std::string text(const char* key) const {
    if (!json_.contains(key)) return {};
    return string_of(json_.at(key), key);
  }

  /// Reads a list whose entries are flags, or {"label", "flags"}.
  std::vector<Row> rows(const Json& list, const std::string& where) const {
    if (!list.is_array()) refuse(where, "a list", list.type_name());
    if (list.empty()) refuse(where, "a list that is not empty", "none");
    std::vector<Row> rows;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Json& entry = list[i];
      const std::string place = fmt::format("{}[{}]", where, i);
      if (entry.is_object() && entry.size() == 2 && entry.contains("label") && entry.contains("flags")) {
        rows.push_back({string_of(entry.at("label"), place), string_of(entry.at("flags"), place)});
      } else {
        const std::string flags = string_of(entry, place);
        rows.push_back({label_of(flags), flags});
      }
    }
    return rows;
  }

  std::vector<Row> rows(const char* key) const {
    return json_.contains(key) ? rows(json_.at(key), key) : std::vector<Row>{};
  }

  std::vector<std::vector<Row>> axes() const {
    std::vector<std::vector<Row>> all;
    if (!json_.contains("axes")) return all;
    if (!json_.at("axes").is_array()) refuse("axes", "a list of lists", json_.at("axes").type_name());
    for (std::size_t i = 0; i < json_.at("axes").size(); ++i)
      all.push_back(rows(json_.at("axes")[i], fmt::format("axes[{}]", i)));
    return all;
  }

  std::vector<std::string> schemes() const {
    std::vector<std::string> names;
    if (!json_.contains("schemes")) return names;
    for (const Row& row : rows(json_.at("schemes"), "schemes")) names.push_back(row.flags);
    return names;
  }

  std::vector<Metric> metrics() const {
    std::vector<Metric> found;
    if (!json_.contains("metrics")) return found;
    if (!json_.at("metrics").is_array()) refuse("metrics", "a list", json_.at("metrics").type_name());
    for (const Json& entry : json_.at("metrics")) {
      const std::string name = string_of(entry, "metrics");
      const auto it =
          std::find_if(all_metrics().begin(), all_metrics().end(), [&](Metric metric) { return metric->name == name; });
      if (it == all_metrics().end()) refuse("metrics", "names that kvq-eval --help lists", printable(name, 40));
      found.push_back(*it);
    }
    return found;
  }

  [[noreturn]] void refuse(const std::string& where, const std::string& expected, const std::string& found) const {
    throw Error{ErrorKind::bad_input,
                fmt::format("{}: {}expected {}, found {}", path_, where.empty() ? "" : where + ": ", expected, found),
                "formats/eval.md describes sweeps"};
  }

 private:
  std::string string_of(const Json& value, const std::string& where) const {
    if (!value.is_string()) refuse(where, "a string", value.type_name());
    return value.get<std::string>();
  }

  std::string path_;
  Json json_;
};

std::vector<Row> product(const std::vector<Row>& rows, const std::vector<Row>& axis) {
  std::vector<Row> all;
  for (const Row& row : rows)
    for (const Row& value : axis)
      all.push_back({row.name.empty()     ? value.name
                     : value.name.empty() ? row.name
                                          : row.name + ", " + value.name,
                     row.flags + " " + value.flags, row.dump.empty() ? value.dump : row.dump});
  return all;
}

/// Runs a step of a row and puts the row's name in front of errors.
template <typename Step>
auto in_row(const Row& row, const Step& step) {
  const auto named = [&](const char* what) {
    return fmt::format("sweep row \"{}\": {}", printable(row.name, 80), what);
  };
  try {
    return step();
  } catch (const Error& error) {
    throw Error{error.kind(), named(error.what()), error.hint()};
  }
}

/// Flags of one row, parsed and resolved.
struct Job {
  CalibrateFlags flags;
  Options options;
};

Job parse_row(const Row& row) {
  CLI::App app;
  Job job;
  add_flags(app, job.flags);
  app.name("kvq-calibrate");
  app.set_help_flag();
  require_decimal_integers(app);
  try {
    app.parse(row.flags, false);
  } catch (const CLI::ParseError& error) {
    throw flag_error(app, error);
  }
  if (!row.dump.empty()) job.flags.inputs.dumps.push_back(row.dump);
  if (concerns_process(job.flags))
    throw Error{ErrorKind::usage, "flags of files, reports and threads have no meaning in a sweep"};
  if (job.flags.inputs.dumps.empty())
    throw Error{ErrorKind::usage, "no dump to calibrate on", "--calibration DUMP.h5, or --model in the row's flags"};
  job.options = resolve_options(job.flags);
  return job;
}

/// Rows with equal keys share statistics; the key has everything that collecting depends on. The moments are part of
/// the key: with further moments a row would get the same codes, but its error would be reported in another metric.
std::string collection_key(const Job& job) {
  const StatsRequest request = make_request(job.flags.behavior, job.options);
  std::string moments;
  for (const Moment moment : request.moments) moments += std::string(to_string(moment)) + " ";
  return fmt::format("{}|{}|{}|{}|{}|{}|{}|{}|{}|{}", moments, to_string(request.queries),
                     fmt::join(job.flags.inputs.dumps, "\n"), job.flags.inputs.layers, job.flags.inputs.first_token,
                     job.flags.inputs.num_tokens.value_or(-1), request.seed, request.sample_tokens,
                     request.held_out_tokens, request.golden_tokens);
}

std::vector<LayerEntry> calibrated_layers(const Job& job, const Dump& dump) {
  return choose_layers(dump.model(), job.flags.inputs.layers.empty()
                                         ? std::vector<int>{}
                                         : parse_int_list(job.flags.inputs.layers, "--layers"));
}

StatsOrigin collect_for(const Job& job, const StatsRequest& request, const fs::path& shards) {
  const Dump dump = Dump::open({job.flags.inputs.dumps.begin(), job.flags.inputs.dumps.end()});
  return collect_shards(dump, {calibrated_layers(job, dump), request, chosen_tokens(job.flags.inputs, dump)},
                        PartsFolder(shards), false);
}

std::string file_name(std::size_t index, const std::string& name) {
  std::string slug;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.';
    if (plain)
      slug += c;
    else if (!slug.empty() && slug.back() != '-')
      slug += '-';
  }
  while (!slug.empty() && slug.back() == '-') slug.pop_back();
  return fmt::format("{:04d}{}{}.safetensors", index, slug.empty() ? "" : "-", slug.substr(0, 80));
}

/// Position of the = in NAME=FILE; npos if the text is only a FILE.
std::size_t end_of_name(const std::string& text) {
  std::error_code failed;
  if (fs::exists(text, failed)) return std::string::npos;
  const std::size_t sign = text.find('=');
  return sign == std::string::npos || text.find('/') < sign ? std::string::npos : sign;
}

}  // namespace

Sweep load_sweep(const fs::path& path, const std::vector<std::string>& calibrations) {
  const SweepReader reader(path);
  Sweep sweep{
      .title = printable(reader.text("title"), 200),
      .rows = reader.rows("rows"),
      .schemes = reader.schemes(),
      .metrics = reader.metrics(),
  };
  if (const auto axes = reader.axes(); !axes.empty()) {
    std::vector<Row> grid{{"", ""}};
    for (const std::vector<Row>& axis : axes) {
      if (grid.size() * axis.size() > kMostRows)
        reader.refuse("axes", fmt::format("at most {} rows", kMostRows),
                      fmt::format("{} or more", grid.size() * axis.size()));
      grid = product(grid, axis);
    }
    sweep.rows.insert(sweep.rows.end(), grid.begin(), grid.end());
  }
  if (sweep.rows.empty()) reader.refuse("", "rows or axes", "neither");
  std::vector<Row> dumps;
  for (const std::string& text : calibrations) {
    const std::size_t sign = end_of_name(text);
    const std::string file = sign == std::string::npos ? text : text.substr(sign + 1);
    const std::string name = sign == std::string::npos ? fs::path(file).stem().string() : text.substr(0, sign);
    dumps.push_back({calibrations.size() > 1 ? name : "", "", file});
  }
  if (!dumps.empty()) sweep.rows = product(sweep.rows, dumps);
  if (sweep.rows.size() > kMostRows)
    reader.refuse("rows", fmt::format("at most {}", kMostRows), fmt::format("{}", sweep.rows.size()));
  for (std::size_t i = 0; i < sweep.rows.size(); ++i) {
    Row& row = sweep.rows[i];
    std::istringstream words(reader.text("flags") + " " + row.flags);
    row.flags.clear();
    for (std::string word; words >> word;) row.flags += (row.flags.empty() ? "" : " ") + word;
    if (row.name.empty()) row.name = row.flags.empty() ? fmt::format("row {}", i + 1) : label_of(row.flags);
  }
  return sweep;
}

void check_sweep(const Sweep& sweep, const ModelGeometry& model, const std::vector<int>& layers) {
  for (const std::string& name : sweep.schemes) find_scheme(name);
  std::vector<Job> jobs;
  jobs.reserve(sweep.rows.size());
  for (const Row& row : sweep.rows) jobs.push_back(in_row(row, [&] { return parse_row(row); }));
  std::map<std::string, Dump> dumps;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    in_row(sweep.rows[i], [&] {
      const Job& job = jobs[i];
      const std::string key = fmt::format("{}", fmt::join(job.flags.inputs.dumps, "\n"));
      if (!dumps.contains(key))
        dumps.emplace(key, Dump::open({job.flags.inputs.dumps.begin(), job.flags.inputs.dumps.end()}));
      const Dump& dump = dumps.at(key);
      check_layers(job.options, dump.model());
      chosen_tokens(job.flags.inputs, dump);
      check_queries(make_request(job.flags.behavior, job.options), job.flags.inputs, dump);
      ModelGeometry own = dump.model();
      own.layers = calibrated_layers(job, dump);
      check_same_model("", own, model, layers);
    });
  }
}

std::vector<Candidate> calibrate_sweep(const Sweep& sweep, const SweepFolders& folders, int threads, bool quiet) {
  const ThreadLimit limit(threads);
  std::vector<Job> jobs;
  jobs.reserve(sweep.rows.size());
  for (const Row& row : sweep.rows) jobs.push_back(in_row(row, [&] { return parse_row(row); }));
  std::map<std::string, StatsOrigin> origins;
  std::vector<Candidate> candidates;
  Progress progress(static_cast<double>(jobs.size()), quiet);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    const fs::path path = folders.artifacts / file_name(i, sweep.rows[i].name);
    in_row(sweep.rows[i], [&] {
      const std::string key = collection_key(job);
      if (origins.count(key) == 0)
        origins.emplace(key, collect_for(job, make_request(job.flags.behavior, job.options),
                                         folders.statistics / fmt::format("{}", origins.size())));
      check_layers(job.options, origins.at(key).header.model);
      save_artifact(decide(origins.at(key), job.flags.behavior.golden_tokens, job.options, true), path);
    });
    candidates.push_back({
        .name = sweep.rows[i].name,
        .path = path.string(),
        .method = job.options.method,
        .temporary = !folders.artifacts_stay,
        .artifact = {},
        .scheme = {},
    });
    progress.update(static_cast<double>(i + 1), fmt::format("calibrated row {} of {}", i + 1, jobs.size()));
  }
  for (const std::string& name : sweep.schemes)
    candidates.push_back(
        {.name = name, .path = {}, .method = {}, .temporary = false, .artifact = {}, .scheme = find_scheme(name)});
  number_equal_names(candidates);
  return candidates;
}

std::string typed_flags(const Row& row) {
  if (row.dump.empty()) return row.flags;
  const char* quote = row.dump.find('"') == std::string::npos ? "\"" : "'";
  return fmt::format("{}{}--model {}{}{}", row.flags, row.flags.empty() ? "" : " ", quote, row.dump, quote);
}

std::vector<std::optional<AllocationDistance>> sweep_distances(const Sweep& sweep,
                                                               const std::vector<Candidate>& candidates) {
  std::vector<std::optional<AllocationDistance>> all(candidates.size());
  if (sweep.rows.size() < 2) return all;
  const auto has_blocks = [](const Artifact& artifact) {
    return std::all_of(artifact.layers.begin(), artifact.layers.end(), [](const LayerPlan& plan) {
      return plan.k.allocation && !plan.k.allocation->block_bits.empty();
    });
  };
  const auto has_same_slots = [](const Artifact& a, const Artifact& b) {
    return std::equal(a.layers.begin(), a.layers.end(), b.layers.begin(), b.layers.end(),
                      [](const LayerPlan& one, const LayerPlan& other) {
                        return one.layer == other.layer && one.geometry == other.geometry &&
                               one.k.rotation.scope == other.k.rotation.scope;
                      });
  };
  const NamedArtifact first{candidates[0].path, load_artifact(candidates[0].path)};
  if (!has_blocks(first.artifact)) return all;
  for (std::size_t c = 0; c < sweep.rows.size(); ++c) {
    const NamedArtifact own{candidates[c].path, load_artifact(candidates[c].path)};
    if (!has_blocks(own.artifact) || !has_same_slots(own.artifact, first.artifact)) continue;
    all[c] = compare_allocations(own, first).total;
  }
  return all;
}

std::string sweep_table(const Sweep& sweep, const std::vector<Candidate>& candidates,
                        const std::vector<CandidateResult>& results) {
  const bool usual = sweep.metrics.empty();
  const std::vector<Metric> columns = usual ? std::vector{Metric("logit_rel_mse"), kOutput, kKl} : sweep.metrics;
  const Metric judge = usual ? kOutput : columns.front();
  const std::vector<bool> front = on_front(results, judge);
  const auto apart = sweep_distances(sweep, candidates);
  const bool mixed = std::any_of(apart.begin(), apart.end(), [](const auto& own) { return own.has_value(); });
  std::vector<std::vector<std::string>> rows{{"row", "bits"}};
  for (const Metric metric : columns) rows[0].emplace_back(metric->header);
  if (usual) rows[0].push_back(fmt::format("{} p99", kKl->header));
  rows[0].emplace_back();
  if (mixed) rows[0].insert(rows[0].end(), {"Hamming", "HB@4", "regret"});
  for (std::size_t c = 0; c < results.size(); ++c) {
    rows.push_back({printable(candidates[c].name, 60), fmt::format("{:.2f}", results[c].bits)});
    for (const Metric metric : columns) rows.back().push_back(number_text(results[c].mean[metric]));
    if (usual) rows.back().push_back(number_text(results[c].distributions[kKl].p99));
    rows.back().emplace_back(front[c] ? "*" : "");
    if (!mixed) continue;
    if (apart[c])
      rows.back().insert(rows.back().end(),
                         {fmt::format("{:.3f}", apart[c]->hamming()),
                          fmt::format("{:.3f}", apart[c]->high_bit_jaccard()), format_excess(apart[c]->regret(), 2)});
    else
      rows.back().insert(rows.back().end(), {"-", "-", "-"});
  }
  std::string text = sweep.title.empty() ? "" : sweep.title + "\n";
  text += format_table(rows, "l" + std::string(rows[0].size() - 1, 'r'));
  text += usual ? "*: on the front, nothing else has both fewer bits and less output error.\n"
                : fmt::format("*: on the front, nothing else has both fewer bits and {} {}.\n",
                              judge->more_is_better ? "more" : "less", judge->name);
  if (mixed) text += "Hamming, HB@4, regret: widths of keys against those of the first row (Block-GTQ C.4).\n";
  return text;
}

void add_sweep(const Sweep& sweep, const std::vector<Candidate>& candidates,
               const std::vector<CandidateResult>& results, Json& document) {
  const auto apart = sweep_distances(sweep, candidates);
  const std::vector<bool> output = on_front(results, kOutput), kl = on_front(results, kKl);
  document["title"] = sweep.title;
  for (std::size_t c = 0; c < results.size(); ++c) {
    Json& scheme = document["schemes"][c];
    scheme["pareto"] = {{kOutput->name, static_cast<bool>(output[c])}, {kKl->name, static_cast<bool>(kl[c])}};
    if (c < sweep.rows.size()) scheme["flags"] = typed_flags(sweep.rows[c]);
    if (apart[c])
      scheme["allocation"] = {{"hamming", apart[c]->hamming()},
                              {"high_bit_jaccard", apart[c]->high_bit_jaccard()},
                              {"regret", apart[c]->regret()}};
  }
}

}  // namespace kvq
