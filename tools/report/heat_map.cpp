#include "report/heat_map.h"

#include "report/axes.h"
#include "report/svg.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

constexpr int kShades = 9;
constexpr double kCharacter = 6.6, kLegendTop = 4.0, kLegendCell = 11.0;
constexpr std::size_t kLongestName = 16, kMostTitles = 8192;  ///< more cells have no tooltips

/// Least and largest value that a logarithm exists of, or low > high.
std::pair<double, double> range_of(const HeatMap& map) {
  double low = INFINITY, high = 0.0;
  for (const std::vector<double>& row : map.values)
    for (const double value : row)
      if (std::isfinite(value) && value > 0.0) {
        low = std::min(low, value);
        high = std::max(high, value);
      }
  return {low, high};
}

class Shades {
 public:
  Shades(double low, double high) : low_(std::log(low)), span_(std::log(high) - std::log(low)) {}
  int of(double value) const {
    if (span_ <= 0.0) return kShades / 2;
    return std::clamp(static_cast<int>(kShades * (std::log(value) - low_) / span_), 0, kShades - 1);
  }

 private:
  double low_, span_;
};

void draw_legend(Svg& svg, const Frame& frame, double low, double high) {
  const std::string first = html_number(low), last = html_number(high);
  double x = frame.left;
  svg.text({x, kLegendTop + 9.0}, "soft", first);
  x += kCharacter * static_cast<double>(first.size()) + 6.0;
  for (int shade = 0; shade < kShades; ++shade, x += kLegendCell)
    svg.rect({x, kLegendTop}, kLegendCell, kLegendCell, fmt::format("h{}", shade));
  svg.text({x + 6.0, kLegendTop + 9.0}, "soft", last + ", log scale");
}

}  // namespace

std::string heat_map(const HeatMap& map) {
  std::size_t longest = num_characters(map.row_title);
  for (const std::string& row : map.rows) longest = std::max(longest, std::min(num_characters(row), kLongestName));
  Frame frame;
  frame.left = 12.0 + kCharacter * static_cast<double>(longest);
  frame.top = 36.0;
  frame.plot_width = frame.width - frame.left - 8.0;
  const auto rows = static_cast<double>(map.rows.size()), columns = static_cast<double>(map.columns.size());
  const double height = std::clamp(240.0 / rows, 4.0, 16.0), step = frame.plot_width / columns;
  frame.plot_height = height * rows;
  frame.height = frame.bottom() + 38.0;
  Svg svg(frame.width, frame.height, map.label);
  const auto [low, high] = range_of(map);
  if (low <= high) draw_legend(svg, frame, low, high);
  const Shades shades(low, high);
  svg.text({frame.left - 6.0, frame.top - 4.0}, "end soft", map.row_title);
  const auto every = static_cast<std::size_t>(std::ceil(11.0 / height));
  const bool titles = map.rows.size() * map.columns.size() <= kMostTitles;
  for (std::size_t r = 0; r < map.rows.size(); ++r) {
    const double top = frame.top + height * static_cast<double>(r);
    if (r % every == 0)
      svg.text({frame.left - 6.0, top + height / 2.0 + 3.5}, "end soft", shortened(map.rows[r], kLongestName));
    for (std::size_t c = 0; c < map.columns.size(); ++c) {
      const double value = map.values[r][c];
      const bool shown = std::isfinite(value) && value > 0.0;
      svg.rect({frame.left + step * static_cast<double>(c), top}, step, height,
               shown ? fmt::format("h{}", shades.of(value)) : "hn",
               titles ? fmt::format("{} {}, {} {}: {}", map.x_title, map.columns[c], map.row_title, map.rows[r],
                                    html_number(value))
                      : "");
    }
  }
  std::vector<double> centers;
  for (std::size_t c = 0; c < map.columns.size(); ++c)
    centers.push_back(frame.left + step * (static_cast<double>(c) + 0.5));
  draw_x_places(svg, frame, centers, map.columns, map.x_title);
  return svg.str();
}

}  // namespace kvq
