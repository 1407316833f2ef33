#include "calibrate/ablation.h"

#include "common/table.h"
#include "common/text_wrap.h"

#include <kvq/methods/decide.h>

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string>

namespace kvq {

namespace {

const TargetRow& row_of(const std::vector<TargetRow>& rows, Target target) {
  return *std::ranges::find(rows, target, &TargetRow::target);
}

/// Relative change from free to runtime of a number of both rows; nothing if the rows do not have the number.
template <typename Number>
std::optional<double> change_of(const std::vector<TargetRow>& rows, Number number) {
  const std::optional<double> runtime = number(row_of(rows, Target::runtime)),
                              free = number(row_of(rows, Target::free));
  return runtime && free && *free > 0.0 ? std::optional(*runtime / *free - 1.0) : std::nullopt;
}

std::optional<double> row_bytes_of(const TargetRow& row) { return row.row_bytes; }
std::optional<double> cost_of(const TargetRow& row) {
  return row.report ? std::optional(row.report->cost) : std::nullopt;
}
std::optional<double> error_of(const TargetRow& row) {
  return row.held_out ? std::optional(row.held_out->output_error) : std::nullopt;
}

std::string decode_text(const TargetRow& row) {
  if (row.tuned_layers == row.layers) return "tuned";
  return row.tuned_layers == 0 ? "generic" : fmt::format("{} of {} layers tuned", row.tuned_layers, row.layers);
}

std::string meaning(const BudgetReport& report) {
  return fmt::format("cost: {} on the held-out tokens",
                     report.metric == "nll" ? "nats a token, second order," : "relative output error");
}

std::string ingredients_table(const std::vector<AblationRow>& rows) {
  std::vector<std::vector<std::string>> table = {{"ingredient", "bits", "bytes", "cost", "change"}};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const BudgetReport& r = rows[i].report;
    table.push_back({rows[i].ingredient, fmt::format("{:.3f}", r.mean_bits), fmt::format("{:.1f}", r.mean_bytes),
                     fmt::format("{:.5g}", r.cost),
                     i == 0 ? "" : fmt::format("{:+.1f}%", 100.0 * (r.cost / rows[i - 1].report.cost - 1.0))});
  }
  return format_table(table, "lrrrr") +
         fmt::format("{},\nboth sides of all layers; each line adds to the one above.\n", meaning(rows.front().report));
}

std::string targets_table(const Ablation& ablation) {
  const std::vector<TargetRow>& rows = ablation.targets;
  const auto number = [](const char* format, const std::optional<double>& value) {
    return value ? fmt::format(fmt::runtime(format), *value) : "-";
  };
  std::vector<std::vector<std::string>> table = {{"target", "bytes a row", "cost", "", "error", "", "decode"}};
  for (const Target target : {Target::free, Target::runtime}) {
    const TargetRow& row = row_of(rows, target);
    const auto change = [&](const std::optional<double>& ratio) {
      return target == Target::free || !ratio ? "" : format_excess(*ratio, 2);
    };
    table.push_back({to_string(target), fmt::format("{:.1f}", row.row_bytes), number("{:.5g}", cost_of(row)),
                     change(change_of(rows, cost_of)), number("{:.4g}", error_of(row)),
                     change(change_of(rows, error_of)), decode_text(row)});
  }
  const std::optional<BudgetReport>& budget = rows.front().report;
  std::string legend = !budget                        ? "cost: only decisions with a budget have one."
                       : ablation.ingredients.empty() ? meaning(*budget) + "."
                                                      : "cost: as above.";
  legend += " error: of attention's output on the held-out tokens, no exact windows, mean over layers";
  legend += rows.front().held_out ? "." : "; none are held out here (--held-out-tokens).";
  return format_table(table, "lrrrrrl") + wrapped("", legend);
}

}  // namespace

std::string ablation_text(const Ablation& ablation) {
  const bool has_ingredients = !ablation.ingredients.empty();
  return (has_ingredients ? ingredients_table(ablation.ingredients) + "\n" : "") + targets_table(ablation);
}

Json ingredients_json(const std::vector<AblationRow>& rows) {
  Json all = Json::array();
  for (const AblationRow& row : rows) {
    Json one = budget_to_json(row.report);
    one["ingredient"] = row.ingredient;
    all.push_back(std::move(one));
  }
  return all;
}

Json targets_json(const std::vector<TargetRow>& rows) {
  Json json;
  for (const TargetRow& row : rows) {
    Json one = row.report ? budget_to_json(*row.report) : Json::object();
    one["row_bytes"] = row.row_bytes;
    one["layers"] = row.layers;
    one["tuned_layers"] = row.tuned_layers;
    if (row.held_out) one["held_out"] = held_out_to_json(*row.held_out);
    json[to_string(row.target)] = std::move(one);
  }
  const auto add = [&](const char* name, const std::optional<double>& ratio) {
    if (ratio) json["change_percent"][name] = 100.0 * *ratio;
  };
  add("row_bytes", change_of(rows, row_bytes_of));
  add("cost", change_of(rows, cost_of));
  add("output_error", change_of(rows, error_of));
  return json;
}

}  // namespace kvq
