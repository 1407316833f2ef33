#include "report/dot_plot.h"

#include "report/axes.h"
#include "report/svg.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

constexpr double kRow = 22.0, kNumber = 66.0, kCharacter = 7.6;
constexpr std::size_t kLongestName = 18;

}  // namespace

std::string dot_plot(const DotPlot& plot) {
  std::size_t longest = 0;
  std::vector<double> values;
  for (const DotRow& row : plot.rows) {
    longest = std::max(longest, std::min(num_characters(row.name), kLongestName));
    // Room on both sides of a dot.
    values.insert(values.end(), {row.value / 1.2, row.value * 1.2});
  }
  Frame frame;
  frame.left = 12.0 + kCharacter * static_cast<double>(longest);
  frame.plot_width = frame.width - frame.left - kNumber;
  frame.plot_height = kRow * static_cast<double>(plot.rows.size());
  frame.height = frame.bottom() + 38.0;
  const Scale x = scale_for(values, frame.left, frame.right(), true);
  Svg svg(frame.width, frame.height, plot.label);
  draw_x_axis(svg, frame, x, plot.x_title);
  double y = frame.top + kRow / 2.0;
  for (const DotRow& row : plot.rows) {
    const std::string css = row.strong ? "strong" : "";
    svg.text({frame.left - 8.0, y + 3.5}, "end " + css, shortened(row.name, kLongestName));
    if (x.shows(row.value)) {
      svg.line({frame.left, y}, {x(row.value), y}, "leader " + series_css(row.style));
      svg.marker({x(row.value), y}, row.style, "mark " + series_css(row.style),
                 fmt::format("{}: {}", row.name, html_number(row.value)));
    }
    svg.text({frame.right() + 6.0, y + 3.5}, css, html_number(row.value));
    y += kRow;
  }
  return svg.str();
}

}  // namespace kvq
