#include "calibrate/report.h"

#include "common/plural.h"
#include "common/table.h"
#include "common/text_wrap.h"
#include "inspect/legend.h"
#include "inspect/report.h"
#include "inspect/serving.h"
#include "inspect/verdict.h"

#include <fmt/core.h>
#include <kvq/artifact/manifest.h>
#include <kvq/core/text.h>
#include <kvq/methods/decide.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

std::string clip_text(const TensorPlan& plan) {
  if (plan.clip_ratio.empty()) return "-";
  const auto [lo, hi] = std::minmax_element(plan.clip_ratio.begin(), plan.clip_ratio.end());
  if (*lo == *hi) return *lo == 1.0 ? "none" : fmt::format("{:.2f}", *lo);
  return fmt::format("{:.2f}-{:.2f}", *lo, *hi);
}

/// Bits of a code; of mixed widths the mean.
std::string bits_text(const TensorPlan& plan) {
  if (is_exact(plan.coder)) return "exact";
  return plan.allocation ? fmt::format("{:.2f}", mean_code_bits(plan)) : std::to_string(code_bits(plan.coder));
}

bool has_transform(const LayerPlan& layer) { return layer.k.transform || (layer.v && layer.v->transform); }

/// @param gains  whether the table has a column of outlier gains
std::vector<std::string> table_row(const LayerPlan& layer, const TensorPlan& plan, Side side, const Windows& windows,
                                   std::int64_t context, bool gains) {
  const int dim = layer.geometry.dim(side);
  std::vector<std::string> row = {side == Side::k ? std::to_string(layer.layer) : "",
                                  name(side),
                                  rotation_text(plan),
                                  clip_text(plan),
                                  bits_text(plan),
                                  fmt::format("{:.2f}", effective_bits(plan, dim, windows, context))};
  row.push_back(plan.error ? change_text(plan.error->before, plan.error->after, 4) : "");
  if (!gains) return row;
  const double largest =
      plan.transform ? *std::max_element(plan.transform->outlier_gain.begin(), plan.transform->outlier_gain.end())
                     : 0.0;
  row.push_back(plan.transform ? fmt::format("{:.3g}", largest) : "-");
  return row;
}

Json side_json(const TensorPlan& plan, int dim, const Windows& windows, std::int64_t context) {
  Json json = plan_to_json(plan, dim);
  json["effective_bits"] = effective_bits(plan, dim, windows, context);
  json["mean_code_bits"] = mean_code_bits(plan);
  return json;
}

RotationRow mean_row(const LayerRotationReport& report, std::size_t index) {
  RotationRow mean{.recipe = report.heads.front().k[index].recipe};
  const auto n = static_cast<double>(report.heads.size());
  for (const auto& head : report.heads) {
    const RotationRow& row = head.k[index];
    mean.largest = std::max(mean.largest, row.largest);
    mean.group_range += row.group_range / n;
    mean.importance_peak += row.importance_peak / n;
    mean.importance_spread = std::max(mean.importance_spread, row.importance_spread);
    mean.error_trace += row.error_trace / n;
  }
  return mean;
}

/// What the target came to; empty if none was asked for.
std::string target_text(const Json& b) {
  const std::string result = b.value("target", "");
  if (result == "kept") {
    const double cost = b.at("cost"), free = b.at("free_cost");
    return wrapped("target: ", fmt::format("rows have sizes that tuned kernels decode; with --target free the cost is "
                                           "{:.4g} ({}).",
                                           free, format_excess(free / cost - 1.0, 1)));
  }
  const char* reason = result == "no_kernels"        ? "no tuned kernel decodes such rows"
                       : result == "budget_too_low"  ? "rows of tuned kernels are larger than the budget"
                       : result == "budget_too_high" ? "rows of tuned kernels are smaller than the budget"
                                                     : nullptr;
  return reason ? wrapped("target: ", fmt::format("nothing is restricted: {}.", reason)) : "";
}

}  // namespace

std::string closing_table(const Artifact& artifact, std::int64_t context) {
  std::vector<std::vector<std::string>> rows = {
      {"layer", "side", "rotation", "clip", "bits", "eff.bits", "in-sample error"}};
  const bool gains = std::any_of(artifact.layers.begin(), artifact.layers.end(), has_transform);
  if (gains) rows.front().push_back("gain");
  for (const LayerPlan& layer : artifact.layers) {
    rows.push_back(table_row(layer, layer.k, Side::k, artifact.windows, context, gains));
    if (layer.v) rows.push_back(table_row(layer, *layer.v, Side::v, artifact.windows, context, gains));
  }
  std::string text = format_table(rows, gains ? "rlllrrlr" : "rlllrrl");
  text += rotation_legend(recipes_of(artifact));
  text += wrapped("eff.bits: ",
                  fmt::format("codes, scales and exact windows ({} sink, {} recent) at {}.",
                              artifact.windows.sink_tokens, artifact.windows.recent_tokens, counted(context, "token")));
  text += error_legend(artifact);
  if (gains)
    text += wrapped("gain: ",
                    "largest outlier gain of the heads, squared error of rows rotated orthogonally over that of "
                    "balanced ones.");
  if (!artifact.calibration.budget.is_null()) text += budget_text(artifact.calibration.budget);
  const auto permutes_for_nothing = [](const TensorPlan& plan, int dim) {
    const auto* uniform = std::get_if<UniformCoder>(&plan.coder);
    return uniform && uniform->group_size == dim && plan.rotation.recipe.ends_with("P");
  };
  const LayerPlan& first = artifact.layers.front();
  if (permutes_for_nothing(first.k, first.geometry.head_dim))
    text += "P changes nothing here: one group is a whole row, and order inside a group does not matter.\n";
  return text;
}

std::string rotation_table(const std::vector<LayerRotationReport>& reports, Scope scope) {
  std::string text = "OSCAR Table 10 on the sampled keys, INT2 (means over KV heads; max|k|: maximum)\n";
  text += scope == Scope::layer ? "C_Q is the mean over the KV heads of a layer, which share one rotation\n"
                                : "each KV head has its own C_Q; --share layer takes the mean, as the paper does\n";
  std::vector<std::vector<std::string>> rows = {
      {"layer", "rotation", "max|k|", "max-min", "importance", "tr(E_K)", "top-8 align"}};
  double spread = 0.0, peak_difference = 0.0;
  for (const LayerRotationReport& report : reports) {
    double alignment = 0.0;
    for (const auto& head : report.heads) {
      alignment += head.alignment / static_cast<double>(report.heads.size());
      peak_difference = std::max(peak_difference, std::abs(head.k[3].largest - head.k[4].largest) / head.k[3].largest);
    }
    for (std::size_t i = 0; i < report.heads.front().k.size(); ++i) {
      const RotationRow row = mean_row(report, i);
      if (i >= 3) spread = std::max(spread, row.importance_spread);
      rows.push_back({i == 0 ? std::to_string(report.layer) : "", row.recipe, fmt::format("{:.2f}", row.largest),
                      fmt::format("{:.2f}", row.group_range), fmt::format("{:.2f}", row.importance_peak),
                      fmt::format("{:.2f}", row.error_trace), i == 0 ? fmt::format("{:.3f}", alignment) : ""});
    }
  }
  text += format_table(rows, "rlrrrrr");
  text += wrapped("Lemma 1: ",
                  fmt::format("diag(R^T C_Q R) within Hadamard blocks of U*H and U*H*P deviates by {:.1e}", spread));
  text += fmt::format("P only permutes: max|k| of U*H and U*H*P differ by {:.1e}\n", peak_difference);
  return text;
}

Json rotation_json(const std::vector<LayerRotationReport>& reports) {
  Json layers = Json::array();
  for (const LayerRotationReport& report : reports) {
    Json heads = Json::array();
    for (const auto& head : report.heads) {
      Json rows = Json::array();
      for (const RotationRow& row : head.k)
        rows.push_back({{"rotation", row.recipe},
                        {"max_abs", row.largest},
                        {"group_range", row.group_range},
                        {"importance_max_over_mean", row.importance_peak},
                        {"importance_spread", row.importance_spread},
                        {"error_trace", row.error_trace}});
      heads.push_back({{"k", std::move(rows)}, {"top8_alignment", head.alignment}});
    }
    layers.push_back({{"layer", report.layer}, {"heads", std::move(heads)}});
  }
  return layers;
}

Json calibrate_json(const Artifact& artifact, const std::filesystem::path& output, std::int64_t context) {
  Json layers = Json::array();
  for (const LayerPlan& layer : artifact.layers) {
    Json row = {{"layer", layer.layer}, {"k", side_json(layer.k, layer.geometry.head_dim, artifact.windows, context)}};
    if (layer.v) row["v"] = side_json(*layer.v, layer.geometry.v_head_dim, artifact.windows, context);
    layers.push_back(std::move(row));
  }
  Json json = {
      {"schema_version", "1.2"},
      {"tool", "kvq-calibrate " KVQ_VERSION},
      {"output", utf8_text(output.string())},
      {"method", artifact.calibration.method},
      {"dump_hash", artifact.calibration.dump_hash},
      {"tokens", artifact.calibration.tokens},
      {"context", context},
      {"windows", {{"sink_tokens", artifact.windows.sink_tokens}, {"recent_tokens", artifact.windows.recent_tokens}}},
      {"layers", std::move(layers)},
      {"serving", serving_json(artifact)},
      {"missing_layers", missing_layers(artifact)},
      {"verdict", verdict_json(verdict_of(artifact, output, context))}};
  if (!artifact.calibration.budget.is_null()) json["budget"] = artifact.calibration.budget;
  return json;
}

std::string budget_text(const Json& b) {
  const bool nll = b.at("metric") == "nll";
  const double cost = b.at("cost"), gap = b.at("gap");
  std::string text =
      wrapped("budget: ",
              fmt::format("{:.4g} {} wanted, {:.4g} spent; {:.3f} code bits, {:.1f} bytes a token and layer.",
                          b.at("budget").get<double>(), b.at("unit").get<std::string>(), b.at("spent").get<double>(),
                          b.at("mean_bits").get<double>(), b.at("mean_bytes").get<double>()));
  text += wrapped("cost: ", fmt::format("expected {:.4g} {} on {} held-out tokens; the choice is within {:.1f}% of the "
                                        "best.",
                                        cost, nll ? "nats a token" : "(relative output error)",
                                        b.at("held_out_tokens").get<std::int64_t>(), 100.0 * gap));
  text += target_text(b);
  if (!nll)
    text += wrapped("",
                    "The dump has no output curvature (dump_qkv.py --curvature): layers are weighted by their relative "
                    "output error, which says little about which layer matters.");
  return text;
}

}  // namespace kvq
