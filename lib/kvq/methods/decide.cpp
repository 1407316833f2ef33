#include <kvq/codec/golden_rows.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/dump/content_hash.h>
#include <kvq/methods/decide.h>
#include <kvq/methods/held_out_error.h>
#include <kvq/methods/layers.h>
#include <kvq/methods/option_table.h>
#include <kvq/stats/golden_tokens.h>

#include <cmath>
#include <utility>

namespace kvq {

namespace {

/// Refuses results that numbers of extreme size have made infinite or NaN.
void expect_finite_numbers(const Decision& decision) {
  const auto expect = [](double value, const std::string& where) {
    if (!std::isfinite(value))
      throw Error{ErrorKind::numerical, fmt::format("{}: expected a finite number, found {}", where, value),
                  "numbers of the dump or of the statistics are too large to calculate with"};
  };
  for (const LayerPlan& layer : decision.plans)
    for (const Side side : kSides) {
      const TensorPlan* plan = layer.side(side);
      const std::string where = fmt::format("layer {}: {}", layer.layer, name(side));
      if (plan != nullptr && plan->error) {
        expect(plan->error->before, where + ": calibration error before");
        expect(plan->error->after, where + ": calibration error");
      }
      if (plan != nullptr && plan->allocation) expect(plan->allocation->objective, where + ": objective of the widths");
    }
  if (decision.budget) {
    expect(decision.budget->cost, "budget: cost of the chosen plans");
    expect(decision.budget->gap, "budget: gap of the chosen plans");
    expect(decision.budget->free_cost, "budget: cost without the target");
  }
}

/// Golden rows of all layers, quantized by the plans. golden_rows() loads the tokens of all layers first, which are
/// few, and then quantizes in parallel.
std::map<int, GoldenRows> golden_rows(const StatsSource& source, const std::vector<LayerPlan>& plans,
                                      std::int64_t most_tokens, const Backend& backend) {
  std::vector<std::pair<const LayerPlan*, GoldenTokens>> tasks;
  for_each_layer(
      backend, most_tokens > 0 ? plans.size() : 0,
      [&](std::size_t i) {
        const auto stats = source.load(i);
        return stats->golden ? std::optional(last_golden(*stats->golden, plans[i].geometry, most_tokens))
                             : std::nullopt;
      },
      [&](std::size_t i, std::optional<GoldenTokens> tokens) {
        if (tokens) tasks.emplace_back(&plans[i], *std::move(tokens));
      });
  std::vector<GoldenRows> rows(tasks.size());
  parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
    auto& [plan, tokens] = tasks[static_cast<std::size_t>(i)];
    rows[static_cast<std::size_t>(i)] = code_golden_rows(*plan, std::move(tokens), parallel_for);
  });
  std::map<int, GoldenRows> by_layer;
  for (std::size_t i = 0; i < tasks.size(); ++i) by_layer[tasks[i].first->layer] = std::move(rows[i]);
  return by_layer;
}

}  // namespace

Artifact decide(const Method& method, const StatsSource& source, const DecisionOrigin& origin, const Options& options,
                std::int64_t golden_tokens, const MethodContext& context) {
  Artifact artifact;
  artifact.model = origin.header.model;
  artifact.windows = options.windows;
  Provenance& c = artifact.calibration;
  c.method = method.name;
  c.dump_hash = joint_hash_of(origin.content_hashes);
  c.dump_producer = origin.header.producer;
  c.capture_point = origin.header.capture_point;
  c.seed = options.seed;
  c.tokens = origin.tokens;
  c.sequences = origin.sequences;
  c.options = options_to_json(method, options);
  c.options["sample_tokens"] = origin.header.sample_tokens;
  if (origin.header.queries != Queries::all) c.options["queries"] = to_string(origin.header.queries);
  if (const auto& range = origin.header.range) c.options["tokens"] = {{"first", range->first}, {"count", range->count}};
  Decision decision = method.decide(source, options, context);
  expect_finite_numbers(decision);
  if (decision.budget) c.budget = budget_to_json(*decision.budget);
  if (const auto report = held_out_report(source, decision.plans, context.backend))
    c.held_out = held_out_to_json(*report);
  artifact.layers = std::move(decision.plans);
  artifact.golden = golden_rows(source, artifact.layers, golden_tokens, context.backend);
  return artifact;
}

Json budget_to_json(const BudgetReport& r) {
  Json json = {{"unit", r.unit},
               {"budget", r.budget},
               {"spent", r.spent},
               {"mean_bits", r.mean_bits},
               {"mean_bytes", r.mean_bytes},
               {"metric", r.metric},
               {"cost", r.cost},
               {"gap", r.gap},
               {"held_out_tokens", r.tokens}};
  if (r.target != TargetResult::unasked) json["target"] = to_string(r.target);
  if (r.target == TargetResult::kept) json["free_cost"] = r.free_cost;
  return json;
}

}  // namespace kvq
