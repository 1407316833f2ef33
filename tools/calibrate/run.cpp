#include "calibrate/run.h"

#include "calibrate/report.h"

#include <kvq/codec/golden_rows.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/dump/content_hash.h>
#include <kvq/methods/joint_budget.h>
#include <kvq/stats/golden_tokens.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvq {

namespace {

/// Hash of the dump data of all layers, in layer order.
std::string joint_hash(const StatsOrigin& origin) {
  std::string all;
  for (const auto& entry : origin.entries) all += entry.content_hash + "\n";
  return content_hash_of(all);
}

}  // namespace

StatsRequest make_request(const CalibrateFlags& flags, const Options& options) {
  StatsRequest request{
      .moments = find_method(options.method).needs(options),
      .sample_tokens = flags.sample_tokens,
      .seed = options.seed,
  };
  // Only budget methods hold out tokens by default. For other methods statistics cover the whole dump unless
  // --held-out-tokens is given.
  if (options.budget_bits || options.budget_bytes || flags.held_out_given)
    request.held_out_tokens = flags.held_out_tokens;
  request.golden_tokens = flags.golden_tokens;
  for (const std::string& name : flags.collect) {
    if (name == "all") {
      request.moments.insert(std::begin(kAllMoments), std::end(kAllMoments));
      continue;
    }
    const auto moment = moment_from_string(name);
    if (!moment)
      throw Error{ErrorKind::usage, fmt::format("--collect: unknown moment \"{}\"", name),
                  "choose query, key, value, scored_value, scored_query, sst or all"};
    request.moments.insert(*moment);
  }
  return request;
}

TokenRange chosen_tokens(const CalibrateFlags& flags, const Dump& dump) {
  const std::int64_t tokens = dump.num_tokens(), rest = tokens - flags.first_token;
  if (rest < 1 || flags.num_tokens.value_or(rest) > rest)
    throw Error{ErrorKind::usage,
                fmt::format("--first-token {}{}: the dump has {} tokens", flags.first_token,
                            flags.num_tokens ? fmt::format(" and --num-tokens {}", *flags.num_tokens) : "", tokens)};
  return {flags.first_token, flags.num_tokens.value_or(rest)};
}

void check_exact_layers(const Options& options, const ModelGeometry& model) {
  for (const int layer : options.exact_layers)
    if (std::none_of(model.layers.begin(), model.layers.end(),
                     [&](const LayerEntry& entry) { return entry.layer == layer; }))
      throw Error{ErrorKind::usage,
                  fmt::format("--exact-layers: layer {} is not there (the file has {} layers, {} to {})", layer,
                              model.layers.size(), model.layers.front().layer, model.layers.back().layer)};
}

namespace {

/// Golden rows of all layers, quantized by the plans. golden_rows() loads the tokens of all layers first, which are
/// few, and then quantizes in parallel.
std::map<int, GoldenRows> golden_rows(const StatsOrigin& origin, const std::vector<LayerPlan>& plans,
                                      std::int64_t most_tokens) {
  std::vector<std::pair<const LayerPlan*, GoldenTokens>> tasks;
  for (std::size_t i = 0; most_tokens > 0 && i < plans.size(); ++i)
    if (const auto stats = origin.load(i); stats->golden)
      tasks.emplace_back(&plans[i], last_golden(*stats->golden, plans[i].geometry, most_tokens));
  std::vector<GoldenRows> rows(tasks.size());
  parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
    auto& [plan, tokens] = tasks[static_cast<std::size_t>(i)];
    rows[static_cast<std::size_t>(i)] = code_golden_rows(*plan, std::move(tokens));
  });
  std::map<int, GoldenRows> by_layer;
  for (std::size_t i = 0; i < tasks.size(); ++i) by_layer[tasks[i].first->layer] = std::move(rows[i]);
  return by_layer;
}

}  // namespace

Artifact decide(const StatsOrigin& origin, const CalibrateFlags& flags, const Options& options, bool quiet) {
  Artifact artifact;
  artifact.model = origin.header.model;
  artifact.windows = options.windows;
  Provenance& c = artifact.calibration;
  c.method = options.method;
  c.dump_hash = joint_hash(origin);
  c.dump_producer = origin.header.producer;
  c.capture_point = origin.header.capture_point;
  c.seed = options.seed;
  c.options = options_to_json(options);
  c.options["sample_tokens"] = origin.header.sample_tokens;
  if (const auto& range = origin.header.range) c.options["tokens"] = {{"first", range->first}, {"count", range->count}};
  Progress progress(static_cast<double>(origin.size()), quiet);
  const LayerDone done = [&](std::size_t i) {
    progress.update(static_cast<double>(i + 1),
                    fmt::format("decided layer {} ({}/{})", origin.header.model.layers[i].layer, i + 1, origin.size()));
  };
  if (options.budget_bits || options.budget_bytes) {
    BudgetDecision decision = decide_with_budget(origin, options, done);
    artifact.layers = std::move(decision.plans);
    c.budget = budget_json(decision.report);
  } else {
    artifact.layers = find_method(options.method).decide(origin, options, done);
  }
  artifact.golden = golden_rows(origin, artifact.layers, flags.golden_tokens);
  c.tokens = origin.entries.front().tokens;
  c.sequences = origin.entries.front().sequences;
  return artifact;
}

}  // namespace kvq
