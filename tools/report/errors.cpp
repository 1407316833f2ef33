#include "report/heat_map.h"
#include "report/line_chart.h"
#include "report/page.h"
#include "report/scatter.h"
#include "report/sections.h"
#include "report/sides.h"
#include "report/svg.h"
#include "report/text.h"

#include <kvq/eval/metrics.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace kvq {

namespace {

constexpr const char* kHowToEvaluate =
    "kvq-eval --model HELDOUT.h5 ARTIFACT --scheme naive-int4 --scheme fp8 --json > EVAL.json, then --eval EVAL.json.";

constexpr std::size_t kTableSchemes = 7;  ///< as many schemes fit side by side in half the width of a page
/// More layers than this are cells of a heat map, because lines of several schemes would cover each other.
constexpr std::size_t kMostLinePlaces = 32;

/// A metric in kvq-eval's documents, or a part of its distribution.
struct ShownMetric {
  Metric metric;
  const char* part;  ///< of the distribution, or null
  const char* what;
  /// For metric_of().
  std::string path() const { return fmt::format("{}{}{}", metric->name, part ? "/" : "", part ? part : ""); }
  std::string title() const {
    return fmt::format("{}: {}{}{}", metric->name, what, metric->unit.empty() ? "" : ", ", metric->unit);
  }
};
constexpr ShownMetric kOutput{Metric("output_rel_mse"), nullptr, "error of attention's output"};
constexpr ShownMetric kKl{Metric("attention_kl"), "mean", "mean KL of the weights"};
constexpr ShownMetric kKlP99{Metric("attention_kl"), "p99", "99th percentile over queries"};
constexpr ShownMetric kByLayer[] = {kOutput,
                                    {Metric("logit_rel_mse"), nullptr, "error of the logits"},
                                    kKl,
                                    kKlP99,
                                    {Metric("k_rel_mse"), nullptr, "error of the keys"},
                                    {Metric("v_rel_mse"), nullptr, "error of the values"}};

using Schemes = std::vector<EvaluatedScheme>;

/// Replaces a chart whose values are all 0, because a logarithmic axis cannot show 0.
constexpr const char* kAllZero =
    "0 everywhere: the exact windows hold whole sequences. kvq-eval --no-windows reads every token as codes.";

/// A chart of one metric with a table below. The table has all schemes; the chart has the first kMostStyles schemes.
/// @param values  of a scheme, at each place
template <typename Values>
std::string scheme_figure(const std::string& title, const std::string& x_title, const std::vector<std::string>& places,
                          const Schemes& schemes, Values values) {
  const std::string label = fmt::format("{}, by {}, logarithmic, {} schemes; the numbers are in the table below", title,
                                        x_title, schemes.size());
  LineChart chart{.label = label, .x_title = x_title, .places = places, .lines = {}};
  HeatMap map{.label = label, .x_title = x_title, .row_title = "scheme", .columns = places, .rows = {}};
  HtmlRows rows{{x_title}};
  for (const std::string& place : places) rows.push_back({place});
  bool any_number = false;
  for (std::size_t s = 0; s < schemes.size(); ++s) {
    const std::vector<double> own = values(schemes[s]);
    any_number = any_number || std::any_of(own.begin(), own.end(), [](double x) { return std::isfinite(x); });
    rows[0].push_back(schemes[s].name);
    for (std::size_t i = 0; i < places.size(); ++i) rows[i + 1].push_back(html_number(own[i]));
    if (s >= kMostStyles || std::none_of(own.begin(), own.end(), [](double x) { return x > 0.0; })) continue;
    chart.lines.push_back(
        {.name = schemes[s].name, .values = own, .style = static_cast<int>(s), .strong = schemes[s].own});
    map.rows.push_back(schemes[s].name);
    map.values.push_back(own);
  }
  if (!any_number) return "";
  const std::string drawing = places.size() > kMostLinePlaces ? heat_map(map) : line_chart(chart);
  return html_figure(title, chart.lines.empty() ? html_missing(kAllZero) : drawing,
                     html_numbers(rows, "l" + std::string(schemes.size(), 'r'), kTableSchemes));
}

std::string too_many_note(const Schemes& schemes) {
  return schemes.size() <= kMostStyles
             ? ""
             : html_note(fmt::format("Lines of the first {} of {} schemes; the others are in the tables.", kMostStyles,
                                     schemes.size()));
}

std::string layer_figure(const ShownMetric& metric, const Schemes& schemes, const std::vector<std::string>& places) {
  return scheme_figure(metric.title(), "layer", places, schemes, [&](const EvaluatedScheme& scheme) {
    std::vector<double> values;
    for (const Json& layer : (*scheme.json)["layers"]) values.push_back(metric_of(layer, metric.path()));
    return values;
  });
}

/// Heat map of one metric of the report's artifact, by layer and KV head; empty if no document measures the artifact.
std::string head_figure(const Metric& metric, const Schemes& schemes, const std::vector<std::string>& layers) {
  if (schemes.empty() || !schemes.front().own) return "";
  const Json& own = (*schemes.front().json)["layers"];
  std::size_t heads = 0;
  for (const Json& layer : own) heads = std::max(heads, layer["heads"].size());
  const std::string title = fmt::format("{} of this artifact by layer and KV head", metric->name);
  HeatMap map{.label = fmt::format("{}, logarithmic; the numbers are in the table below", title),
              .x_title = "layer",
              .row_title = "KV head",
              .columns = layers,
              .rows = {},
              .values = std::vector(heads, std::vector<double>(layers.size(), NAN))};
  HtmlRows rows{{"layer"}};
  for (std::size_t h = 0; h < heads; ++h) {
    map.rows.push_back(std::to_string(h));
    rows[0].push_back(fmt::format("head {}", h));
  }
  bool any = false;
  for (std::size_t l = 0; l < own.size(); ++l) {
    rows.push_back({layers[l]});
    for (std::size_t h = 0; h < own[l]["heads"].size(); ++h) {
      map.values[h][l] = metric_of(own[l]["heads"][h], metric->name);
      any = any || map.values[h][l] > 0.0;
      rows.back().push_back(html_number(map.values[h][l]));
    }
    rows.back().resize(rows[0].size(), "–");
  }
  return any ? html_figure(title, heat_map(map), html_numbers(rows, "l" + std::string(heads, 'r'))) : "";
}

/// Change of output_rel_mse from the first candidate of the same document: "+12.3% [+10.0%, +14.9%]".
std::string change_text(const EvaluatedScheme& scheme) {
  for (const Json& own : scheme.evaluation->document["comparisons"]) {
    if (own["scheme"] != (*scheme.json)["name"] || own["metric"] != kOutput.path() || !own["change"].is_number() ||
        !own["interval"][0].is_number() || !own["interval"][1].is_number())
      continue;
    return fmt::format("{:+.1f}% [{:+.1f}, {:+.1f}]", 100.0 * own["change"].get<double>(),
                       100.0 * own["interval"][0].get<double>(), 100.0 * own["interval"][1].get<double>());
  }
  return "–";
}

std::string scheme_table(const Schemes& schemes) {
  HtmlRows rows{{"scheme", "bits", "output_rel_mse", "against the first, 95%", "attention_kl", "its p99",
                 "top10_overlap", "k_rel_mse", "v_rel_mse"}};
  for (const EvaluatedScheme& scheme : schemes) {
    const Json& mean = (*scheme.json)["mean"];
    rows.push_back({scheme.own ? scheme.name + " (this artifact)" : scheme.name,
                    fmt::format("{:.2f}", metric_of(*scheme.json, "effective_bits")),
                    html_number(metric_of(mean, kOutput.path())), change_text(scheme)});
    for (const std::string& metric :
         {kKl.path(), kKlP99.path(), std::string("top10_overlap"), std::string("k_rel_mse"), std::string("v_rel_mse")})
      rows.back().push_back(html_number(metric_of(mean, metric)));
  }
  return html_table(rows, "lrrrrrrrr");
}

std::string document_notes(const std::vector<Evaluation>& evaluations) {
  std::string html;
  for (const Evaluation& evaluation : evaluations) {
    const Json &dump = evaluation.document["dump"], &settings = evaluation.document["settings"];
    const std::string title =
        evaluation.document.contains("title") ? ", " + evaluation.document["title"].get<std::string>() : "";
    html += html_note(fmt::format("{}{}: {} tokens in {} sequences; {}; bits at {} tokens.", evaluation.file, title,
                                  dump["tokens"].dump(), dump["sequences"].dump(),
                                  settings["windows"].get<bool>() ? "tokens in windows are read exactly"
                                                                  : "windows off, every token is read as codes",
                                  settings["context"].dump()));
  }
  const auto differs = [&](const char* part, const char* key) {
    return std::any_of(evaluations.begin(), evaluations.end(), [&](const Evaluation& other) {
      return other.document[part][key] != evaluations.front().document[part][key];
    });
  };
  if (differs("dump", "files") || differs("dump", "tokens") || differs("settings", "windows") ||
      differs("settings", "context"))
    html += html_note("The documents differ in dump, windows or context: their numbers do not compare one to one.");
  return html;
}

/// Chart of the error that the calibration reports for a side, of plain codes and of the plan.
std::string calibration_figure(const Artifact& artifact, const ReportSide& side) {
  if (!side.any(artifact, [](const TensorPlan& plan) { return plan.error.has_value(); })) return "";
  LineChart chart{
      .label = fmt::format("Calibration error of the {} in each layer, plain codes and this plan, "
                           "logarithmic; the numbers are in the table below",
                           plural(side.side)),
      .x_title = "layer",
      .places = layer_names(artifact),
      .lines = {},
  };
  chart.lines.push_back({
      .name = "plain codes",
      .values =
          layer_values(artifact, side, [](const TensorPlan& plan) { return plan.error ? plan.error->before : NAN; }),
      .style = kBaselineStyle,
  });
  chart.lines.push_back({
      .name = "this plan",
      .values =
          layer_values(artifact, side, [](const TensorPlan& plan) { return plan.error ? plan.error->after : NAN; }),
      .style = side.style,
      .strong = true,
  });
  HtmlRows rows{{"layer", "weighted by", "plain codes", "this plan"}};
  for (const LayerPlan& layer : artifact.layers)
    if (const TensorPlan* plan = side.plan(layer); plan != nullptr && plan->error)
      rows.push_back({std::to_string(layer.layer), plan->error->metric, html_number(plan->error->before),
                      html_number(plan->error->after)});
  return html_figure(fmt::format("{}: relative error that calibration saw", side.title), line_chart(chart),
                     html_numbers(rows, "ltrr"));
}

std::string calibration_charts(const Artifact& artifact) {
  std::string figures;
  for (const ReportSide& side : report_sides()) figures += calibration_figure(artifact, side);
  if (figures.empty()) return html_missing("The artifact says no calibration error.");
  return "<h3>What calibration saw</h3>\n" + html_charts(figures);
}

/// Mean over the layers that have the bucket, as kvq-eval computes it.
std::map<std::int64_t, double> by_context(const Json& scheme, std::string_view metric) {
  std::map<std::int64_t, std::pair<double, int>> sums;
  for (const Json& layer : scheme["layers"]) {
    if (!layer.contains("buckets")) continue;
    for (const Json& bucket : layer["buckets"]) {
      auto& [sum, count] = sums[bucket["first"].get<std::int64_t>()];
      sum += metric_of(bucket, metric);
      ++count;
    }
  }
  std::map<std::int64_t, double> means;
  for (const auto& [first, own] : sums) means[first] = own.first / own.second;
  return means;
}

std::string context_figure(std::string_view metric, const std::string& title, const Schemes& schemes) {
  std::map<std::int64_t, int> firsts;
  for (const EvaluatedScheme& scheme : schemes)
    for (const auto& [first, value] : by_context(*scheme.json, metric))
      if (std::isfinite(value)) firsts[first] = 0;
  std::vector<std::string> places;
  places.reserve(firsts.size());
  for (const auto& [first, unused] : firsts) places.push_back(fmt::format("{}+", first));
  return scheme_figure(title, "tokens before the query", places, schemes, [&](const EvaluatedScheme& scheme) {
    const std::map<std::int64_t, double> own = by_context(*scheme.json, metric);
    std::vector<double> values;
    values.reserve(firsts.size());
    for (const auto& [first, unused] : firsts) values.push_back(own.contains(first) ? own.at(first) : NAN);
    return values;
  });
}

std::string pareto_figure(const ShownMetric& metric, const Schemes& schemes) {
  ScatterChart chart{
      .label = fmt::format("{}, logarithmic, against effective bits, {} schemes; the numbers are in the table below",
                           metric.title(), schemes.size()),
      .x_title = "effective bits of an element",
      .points = {},
  };
  for (std::size_t s = 0; s < schemes.size(); ++s)
    chart.points.push_back({
        .name = schemes[s].name,
        .x = metric_of(*schemes[s].json, "effective_bits"),
        .y = metric_of((*schemes[s].json)["mean"], metric.path()),
        .style = static_cast<int>(s),
        .strong = schemes[s].own,
    });
  mark_front(chart.points);
  std::erase_if(chart.points, [](const ChartPoint& point) { return !std::isfinite(point.y); });
  if (chart.points.empty()) return "";
  const bool visible =
      std::any_of(chart.points.begin(), chart.points.end(), [](const ChartPoint& point) { return point.y > 0.0; });
  HtmlRows rows{{"scheme", "effective bits", "mean over layers", "on the front"}};
  for (const ChartPoint& point : chart.points)
    rows.push_back({point.name, html_number(point.x), html_number(point.y), point.on_front ? "yes" : "no"});
  return html_figure(metric.title(), visible ? scatter_chart(chart) : html_missing(kAllZero),
                     html_numbers(rows, "lrrt"));
}

}  // namespace

std::string error_section(const Artifact& artifact, const std::vector<Evaluation>& evaluations,
                          const Schemes& schemes) {
  if (schemes.empty())
    return html_section(
        "errors", "Errors", "",
        calibration_charts(artifact) +
            html_missing(
                std::string("No evaluation was given. Errors of attention on held-out data appear here after ") +
                kHowToEvaluate));
  std::string figures;
  for (const ShownMetric& metric : kByLayer) figures += layer_figure(metric, schemes, layer_names(artifact));
  std::string heads;
  for (const ShownMetric& metric : {kOutput, kKl}) heads += head_figure(metric.metric, schemes, layer_names(artifact));
  if (figures.empty())
    figures = html_missing("The documents hold none of these metrics: kvq-eval --json without --metric measures all.");
  return html_section(
      "errors", "Errors",
      std::string("Relative mean squared errors and KL on held-out data, as formats/eval.md defines them.") +
          (schemes.front().own ? " The thick line is this artifact." : ""),
      document_notes(evaluations) + scheme_table(schemes) + "<h3>By layer</h3>\n" + too_many_note(schemes) +
          html_charts(figures) + (heads.empty() ? "" : "<h3>By head</h3>\n" + html_charts(heads)) +
          calibration_charts(artifact));
}

std::string context_section(const Schemes& schemes) {
  std::string body = html_charts(context_figure(kKl.metric->name, kKl.title(), schemes) +
                                 context_figure(kOutput.metric->name, kOutput.title(), schemes));
  if (body.empty()) {
    body = html_missing(
        schemes.empty() ? std::string("No evaluation was given: ") + kHowToEvaluate
                        : "The documents hold no buckets of contexts: kvq-eval --json without --metric measures them.");
  } else {
    body = too_many_note(schemes) + body;
  }
  return html_section("context", "Errors by context",
                      "Mean over layers of the queries with so many tokens before them.", body);
}

std::string pareto_section(const Schemes& schemes) {
  std::string body = html_charts(pareto_figure(kOutput, schemes) + pareto_figure(kKl, schemes));
  if (body.empty())
    body = html_missing(schemes.empty() ? std::string("No evaluation was given: ") + kHowToEvaluate
                                        : "The documents hold neither output_rel_mse nor attention_kl: kvq-eval --json "
                                          "without --metric measures them.");
  return html_section("front", "Error against size",
                      "Filled and joined: no other scheme has less of both. Bits count codes, scales, padding and "
                      "exact tokens of windows. Names "
                      "stand where they have room; all are in the tables.",
                      body);
}

}  // namespace kvq
