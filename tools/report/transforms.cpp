#include "inspect/transforms.h"
#include "report/axes.h"
#include "report/page.h"
#include "report/sections.h"
#include "report/sides.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

/// Outlier gains of a side's heads; one gain if all heads share the transform; empty without a transform.
const std::vector<double>& gains_of(const TensorPlan* plan) {
  static const std::vector<double> none;
  return plan != nullptr && plan->transform ? plan->transform->outlier_gain : none;
}

std::vector<ReportSide> transformed_sides(const Artifact& artifact) {
  std::vector<ReportSide> sides;
  for (const ReportSide& side : report_sides())
    if (side.any(artifact, [](const TensorPlan& plan) { return plan.transform.has_value(); })) sides.push_back(side);
  return sides;
}

/// Chart with a mark for each head: keys left of the layer's place, values right of it.
std::string gain_chart(const Artifact& artifact, const std::vector<ReportSide>& sides) {
  constexpr double kBesides = 0.2, kMostBesides = 7.0;  // offset from a layer's place
  const Frame frame{.plot_width = 290.0};
  std::vector<double> values{1.0, 10.0};
  for (const LayerPlan& layer : artifact.layers)
    for (const ReportSide& side : sides)
      values.insert(values.end(), gains_of(side.plan(layer)).begin(), gains_of(side.plan(layer)).end());
  const Scale y = scale_for(values, frame.bottom(), frame.top, true);
  Svg svg(frame.width, frame.height,
          "Outlier gain of every head, layer by layer, on a log scale; the numbers are in the table below");
  draw_y_axis(svg, frame, y);
  const double step = frame.plot_width / static_cast<double>(artifact.layers.size());
  std::vector<double> places;
  places.reserve(artifact.layers.size());
  for (std::size_t i = 0; i < artifact.layers.size(); ++i)
    places.push_back(frame.left + step * (static_cast<double>(i) + 0.5));
  draw_x_places(svg, frame, places, layer_names(artifact), "layer");
  for (const ReportSide& side : sides) {
    const double beside =
        sides.size() == 1 ? 0.0 : std::min(kBesides * step, kMostBesides) * (side.side == Side::k ? -1.0 : 1.0);
    for (std::size_t i = 0; i < artifact.layers.size(); ++i) {
      const std::vector<double>& gains = gains_of(side.plan(artifact.layers[i]));
      for (std::size_t h = 0; h < gains.size(); ++h)
        svg.marker({places[i] + beside, y(gains[h])}, side.style, "mark " + series_css(side.style),
                   fmt::format("layer {} {} head {}: {}", artifact.layers[i].layer, plural(side.side), h,
                               html_number(gains[h])));
    }
  }
  double line = frame.top + 12.0;
  for (const ReportSide& side : sides) {
    svg.marker({frame.right() + 12.0, line - 3.5}, side.style, "mark " + series_css(side.style));
    svg.text({frame.right() + 20.0, line}, "", plural(side.side));
    line += 16.0;
  }
  return svg.str();
}

/// Table with a line for each layer and side and a column for each head.
std::string gain_numbers(const Artifact& artifact, const std::vector<ReportSide>& sides) {
  HtmlRows rows{{"layer", "transform", "largest condition"}};
  std::size_t heads = 0;
  for (const LayerPlan& layer : artifact.layers)
    for (const ReportSide& side : sides) heads = std::max(heads, gains_of(side.plan(layer)).size());
  for (std::size_t h = 0; h < heads; ++h) rows[0].push_back(fmt::format("head {}", h));
  for (const LayerPlan& layer : artifact.layers)
    for (const ReportSide& side : sides) {
      const TensorPlan* plan = side.plan(layer);
      if (plan == nullptr) continue;
      rows.push_back(
          {fmt::format("{} {}", layer.layer, plural(side.side)), plan->transform ? plan->transform->kind : "–",
           plan->transform
               ? html_number(*std::max_element(plan->transform->condition.begin(), plan->transform->condition.end()))
               : "–"});
      for (const double gain : gains_of(plan)) rows.back().push_back(html_number(gain));
      rows.back().resize(rows[0].size(), "–");
    }
  return html_numbers(rows, "lt" + std::string(rows[0].size() - 2, 'r'));
}

}  // namespace

std::string transform_section(const Artifact& artifact) {
  if (!has_transforms(artifact)) return "";
  const std::vector<ReportSide> sides = transformed_sides(artifact);
  return html_section("transforms", "Transforms",
                      "Outlier gain: the squared error of rows rotated orthogonally over that of balanced ones. A head "
                      "at 1 had nothing to gain; "
                      "one at 10 would have had ten times the error.",
                      html_charts(html_figure("Outlier gain of each head", gain_chart(artifact, sides),
                                              gain_numbers(artifact, sides))));
}

}  // namespace kvq
