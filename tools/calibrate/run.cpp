#include "calibrate/run.h"

#include "calibrate/report.h"
#include "common/plural.h"
#include "common/progress.h"

#include <kvq/core/error.h>
#include <kvq/methods/data_size.h>
#include <kvq/methods/decide.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvq {

namespace {

Queries chosen_queries(const Behavior& behavior) {
  const std::string word = behavior.queries.value_or("all");
  const auto queries = queries_from_string(word);
  if (!queries)
    throw Error{ErrorKind::usage, fmt::format("--queries: expected all, generated or prompt, found \"{}\"", word)};
  return *queries;
}

}  // namespace

StatsRequest make_request(const Behavior& behavior, const Options& options) {
  StatsRequest request{
      .moments = find_method(options.method).needs(options),
      .sample_tokens = behavior.sample_tokens,
      .seed = options.seed,
  };
  request.queries = chosen_queries(behavior);
  // Only budget methods hold out tokens by default. For other methods statistics cover the whole dump unless
  // --held-out-tokens is given.
  const bool budget = options.budget_bits || options.budget_bytes;
  request.held_out_tokens = behavior.held_out_tokens.value_or(budget ? kHeldOutTokens : 0);
  request.golden_tokens = behavior.golden_tokens;
  for (const std::string& name : behavior.collect) {
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

TokenRange chosen_tokens(const Inputs& inputs, const Dump& dump) {
  const TokenRange range = choose_tokens(dump.num_tokens(), inputs.first_token, inputs.num_tokens);
  check_tokens(range.count);
  return range;
}

void check_queries(const StatsRequest& request, const Inputs& inputs, const Dump& dump) {
  if (request.queries == Queries::all || dump.marks_generated()) return;
  throw Error{ErrorKind::usage,
              fmt::format("--queries {}: {} has no /generated, which marks the tokens that a model produced",
                          to_string(request.queries), inputs.dumps.front()),
              "dump_qkv.py --generate marks them"};
}

void check_layers(const Options& options, const ModelGeometry& model) {
  for (const int layer : options.exact_layers)
    if (std::none_of(model.layers.begin(), model.layers.end(),
                     [&](const LayerEntry& entry) { return entry.layer == layer; }))
      throw Error{ErrorKind::usage, fmt::format("--exact-layers: layer {} is not there (the file has {}, {} to {})",
                                                layer, counted(model.layers.size(), "layer"),
                                                model.layers.front().layer, model.layers.back().layer)};
  for (const LayerEntry& entry : model.layers)
    for (const Side side : entry.has_values ? std::vector{Side::k, Side::v} : std::vector{Side::k})
      if (const SideOptions& own = options.side(side); own.bits < 16 && own.allocate == Allocate::none)
        resolve_group_size(own.group_size, 0, entry.geometry.dim(side), entry.layer, side);
}

Artifact decide(const StatsOrigin& origin, std::int64_t golden_tokens, const Options& options, bool quiet,
                Backend& backend) {
  DecisionOrigin from{.header = origin.header,
                      .content_hashes = {},
                      .tokens = origin.entries.front().tokens,
                      .sequences = origin.entries.front().sequences};
  check_tokens(from.tokens);
  for (const auto& entry : origin.entries) from.content_hashes.push_back(entry.content_hash);
  Progress progress(static_cast<double>(origin.size()), quiet);
  const auto say = [&](std::size_t i) {
    progress.update(static_cast<double>(i + 1),
                    fmt::format("decided layer {} ({}/{})", origin.header.model.layers[i].layer, i + 1, origin.size()));
  };
  return decide(find_method(options.method), origin, from, options, golden_tokens, {.done = say, .backend = backend});
}

}  // namespace kvq
