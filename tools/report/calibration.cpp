#include "common/layers.h"
#include "inspect/report.h"
#include "report/line_chart.h"
#include "report/page.h"
#include "report/sections.h"
#include "report/sides.h"
#include "report/text.h"

#include <fmt/format.h>
#include <kvq/methods/option_table.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace kvq {

namespace {

constexpr std::size_t kMostPanels = 96;
constexpr double kLowestRatio =
    1e-6;  ///< smaller eigenvalues, relative to the mean, are rounding and would flatten the rest of the curve

/// Eigenvalues of one layer's heads at some indices of the spectrum, each divided by the mean of its head.
struct Spectrum {
  int layer = 0;
  std::vector<double> low, mean, high;
};

/// Indices of the spectrum to draw, ascending: dense at both ends, where spectra bend.
std::vector<std::size_t> shown_places(int dim) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<std::size_t> places;
  for (const std::size_t place : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{4}, d / 16, d / 8, d / 4,
                                  d / 2, 3 * d / 4, 7 * d / 8, d - 2, d - 1})
    if (place < d) places.push_back(place);
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

Spectrum spectrum_of(const TensorPlan& plan, int layer, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const std::vector<float>& values = plan.rotation.spectrum;
  Spectrum spectrum{.layer = layer, .low = {}, .mean = {}, .high = {}};
  const std::size_t num_heads = values.size() / d;
  const auto heads = static_cast<double>(num_heads);
  std::vector<double> means;
  for (std::size_t start = 0; start < values.size(); start += d)
    means.push_back(std::accumulate(values.data() + start, values.data() + start + d, 0.0) / dim);
  for (const std::size_t place : shown_places(dim)) {
    double low = INFINITY, sum = 0.0, high = -INFINITY;
    for (std::size_t h = 0; h < means.size(); ++h) {
      const double ratio = means[h] > 0.0 ? values[h * d + place] / means[h] : NAN;
      low = std::min(low, ratio);
      high = std::max(high, ratio);
      sum += ratio;
    }
    spectrum.low.push_back(std::isfinite(sum) ? low : NAN);
    spectrum.mean.push_back(sum / heads);
    spectrum.high.push_back(std::isfinite(sum) ? high : NAN);
  }
  return spectrum;
}

std::string spectrum_numbers(const std::vector<Spectrum>& spectra, int dim) {
  HtmlRows rows{{"layer", "heads"}};
  for (const std::size_t place : shown_places(dim)) rows[0].push_back(fmt::format("no. {}", place + 1));
  for (const Spectrum& spectrum : spectra) {
    for (const auto& [name, values] :
         {std::pair{"least", &spectrum.low}, {"mean", &spectrum.mean}, {"most", &spectrum.high}}) {
      rows.push_back({std::to_string(spectrum.layer), name});
      for (const double value : *values) rows.back().push_back(html_number(value));
    }
  }
  return html_numbers(rows, "ll" + std::string(rows[0].size() - 2, 'r'));
}

/// Charts of the layers whose rows have `dim` channels, with a common axis.
std::string spectrum_panels(const ReportSide& side, int dim, const std::vector<Spectrum>& spectra) {
  LineChart chart{.label = {}, .x_title = "", .places = {}, .lines = {}, .small = true};
  for (const std::size_t place : shown_places(dim)) {
    chart.places.push_back(std::to_string(place + 1));
    chart.x.push_back(static_cast<double>(place));
  }
  for (const Spectrum& spectrum : spectra)
    for (const std::vector<double>* values : {&spectrum.low, &spectrum.high})
      for (const double value : *values) chart.scale_of.push_back(std::max(value, kLowestRatio));
  std::string figures;
  for (std::size_t i = 0; i < std::min(spectra.size(), kMostPanels); ++i) {
    const Spectrum& own = spectra[i];
    chart.label = fmt::format(
        "Eigenvalues of the {} of layer {} over their mean, logarithmic; the numbers are in the table below",
        plural(side.side), own.layer);
    chart.lines = {{.name = "", .values = own.mean, .style = side.style, .low = own.low, .high = own.high}};
    figures += html_figure(fmt::format("layer {}", own.layer), line_chart(chart), "");
  }
  std::string html = fmt::format("<h3>{}, {} channels</h3>\n", side.title, dim) + html_small_charts(figures);
  if (spectra.size() > kMostPanels)
    html +=
        html_note(fmt::format("The first {} of {} layers; the others are in the table.", kMostPanels, spectra.size()));
  return html + spectrum_numbers(spectra, dim);
}

std::string spectra_of(const Artifact& artifact, const ReportSide& side) {
  std::map<int, std::vector<Spectrum>> groups;
  for (const LayerPlan& layer : artifact.layers)
    if (const TensorPlan* plan = side.plan(layer); plan != nullptr && !plan->rotation.spectrum.empty())
      groups[side.dim(layer)].push_back(spectrum_of(*plan, layer.layer, side.dim(layer)));
  std::string html;
  for (const auto& [dim, spectra] : groups) html += spectrum_panels(side, dim, spectra);
  return html;
}

/// Why a plan keeps no spectrum.
std::string why_no_spectrum(const TensorPlan& plan) {
  if (is_exact(plan.coder)) return "rows are exact, so nothing rotates them";
  const std::string rotation = rotation_text(plan);
  return rotation.find(" or ") != std::string::npos
             ? fmt::format(
                   "some heads rotate by an eigenbasis, others do not ({}), and a layer keeps all spectra or none",
                   rotation)
             : fmt::format("the rotation {} uses no eigenbasis", rotation);
}

/// Lines that say why layers have no spectrum, one for each reason; empty if all layers have one.
std::string missing_spectra(const Artifact& artifact, const ReportSide& side) {
  std::map<std::string, std::vector<int>> layers;
  for (const LayerPlan& layer : artifact.layers)
    if (const TensorPlan* plan = side.plan(layer); plan != nullptr && plan->rotation.spectrum.empty())
      layers[why_no_spectrum(*plan)].push_back(layer.layer);
  std::string html;
  for (const auto& [reason, own] : layers)
    html += html_note(fmt::format("No spectrum of the {} in {} {}: {}.", plural(side.side),
                                  own.size() == 1 ? "layer" : "layers", range_text(own), reason));
  return html;
}

std::string clip_figure(const Artifact& artifact, const ReportSide& side) {
  const auto clips = [](double ratio) { return ratio < 1.0; };
  if (!side.any(artifact, [&](const TensorPlan& plan) {
        return std::any_of(plan.clip_ratio.begin(), plan.clip_ratio.end(), clips);
      }))
    return "";
  const auto over_heads = [&](const auto& reduce) {
    return layer_values(artifact, side, [&](const TensorPlan& plan) {
      return plan.clip_ratio.empty() ? NAN : reduce(plan.clip_ratio);
    });
  };
  ChartLine line{
      .name = plural(side.side),
      .values = over_heads(
          [](const auto& x) { return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size()); }),
      .style = side.style,
  };
  line.low = over_heads([](const auto& x) { return *std::min_element(x.begin(), x.end()); });
  line.high = over_heads([](const auto& x) { return *std::max_element(x.begin(), x.end()); });
  HtmlRows rows{{"layer", "least", "mean", "most"}};
  for (std::size_t i = 0; i < artifact.layers.size(); ++i)
    if (std::isfinite(line.low[i]))
      rows.push_back({std::to_string(artifact.layers[i].layer), html_number(line.low[i]), html_number(line.values[i]),
                      html_number(line.high[i])});
  std::vector<double> scale_of{1.0};  // 1.0: no clip
  for (const std::vector<double>* values : {&line.low, &line.high})
    scale_of.insert(scale_of.end(), values->begin(), values->end());
  const std::string label =
      fmt::format("Clip ratio of the {} in each layer, mean and range over heads; the numbers are in the table below",
                  plural(side.side));
  return html_figure(fmt::format("Clip ratio of the {}: mean and range over heads", plural(side.side)),
                     line_chart({
                         .label = label,
                         .x_title = "layer",
                         .places = layer_names(artifact),
                         .lines = {line},
                         .log = false,
                         .scale_of = scale_of,
                     }),
                     html_numbers(rows, "lrrr"));
}

/// A number that is smaller than this is 0 up to rounding.
constexpr double kRounding = 1e-12;

std::string fact_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return canonical_json(value);
  const double number = value;
  return html_number(std::abs(number) < kRounding ? 0.0 : number);
}

/// Adds a line for each value; the name of a nested value is its path: "budget.unit".
void add_facts(const std::string& name, const Json& value, HtmlRows& rows) {
  if (value.is_object() && !value.empty()) {
    for (const auto& [key, child] : value.items())
      add_facts(name.empty() ? key : fmt::format("{}.{}", name, key), child, rows);
  } else if (!value.is_null() && rows.size() < 400) {
    rows.push_back({name, fact_text(value)});
  }
}

}  // namespace

std::string spectrum_section(const Artifact& artifact) {
  std::string body;
  for (const ReportSide& side : report_sides()) body += spectra_of(artifact, side);
  if (body.empty())
    body = html_missing(
        "This artifact keeps no spectra: its rotations come from no eigenbasis. Methods oscar and kvq keep them.");
  for (const ReportSide& side : report_sides()) body += missing_spectra(artifact, side);
  std::string clips;
  for (const ReportSide& side : report_sides()) clips += clip_figure(artifact, side);
  body += clips.empty()
              ? html_missing(
                    "Nothing is clipped. Codes with scale rule minmax can be: --clip search, which is what oscar does.")
              : "<h3>Clip ratios</h3>\n" + html_charts(clips);
  return html_section("spectra", "Spectra and clip ratios",
                      "Eigenvalues of the moment whose eigenbasis rotates the rows, over their mean: 1 everywhere "
                      "would be round. From the largest "
                      "to the smallest; line: mean of the heads, band: their range.",
                      body);
}

std::string provenance_section(const Artifact& artifact, const std::vector<Evaluation>& evaluations) {
  const Provenance& c = artifact.calibration;
  HtmlRows rows{{"calibration", ""},
                {"method", c.method},
                {"tool", c.tool},
                {"model", artifact.model.name},
                {"fingerprint", artifact.model.fingerprint.empty() ? "none" : artifact.model.fingerprint},
                {"dump", c.dump_hash},
                {"dump producer", c.dump_producer},
                {"captured", c.capture_point},
                {"tokens", std::to_string(c.tokens)},
                {"sequences", std::to_string(c.sequences)},
                {"seed", std::to_string(c.seed)}};
  add_facts("budget", c.budget, rows);
  add_facts("held_out", c.held_out, rows);
  HtmlRows options{{"option", "value"}};
  add_facts("", used_options(c.method, c.options), options);
  const auto block = [](const HtmlRows& facts) { return "<div>" + html_table(facts, "lt") + "</div>\n"; };
  std::string body = block(rows) + block(options);
  for (const Evaluation& evaluation : evaluations) {
    const Json& dump = evaluation.document["dump"];
    HtmlRows facts{
        {"evaluation " + evaluation.name, ""}, {"file", evaluation.file}, {"tool", evaluation.document["tool"]}};
    for (const Json& file : dump["files"])
      if (facts.size() < 20) facts.push_back({"dump", file});
    add_facts("", {{"tokens", dump["tokens"]}, {"sequences", dump["sequences"]}, {"fingerprint", dump["fingerprint"]}},
              facts);
    for (const auto& [key, value] : evaluation.document["settings"].items())
      if (key != "rope_offsets") add_facts(key, value, facts);
    body += block(facts);
  }
  return html_section("provenance", "Provenance", "", "<div class=\"charts wrap\">\n" + body + "</div>\n");
}

}  // namespace kvq
