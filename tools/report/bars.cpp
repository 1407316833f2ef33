#include "report/bars.h"

#include "report/axes.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

/// Horizontal positions of the columns, one for each layer.
class Columns {
 public:
  Columns(const Frame& frame, std::size_t count)
      : left_(frame.left), step_(frame.plot_width / static_cast<double>(count)), count_(count) {}
  double step() const { return step_; }
  double left(std::size_t i) const { return left_ + step_ * static_cast<double>(i); }
  std::vector<double> centers() const {
    std::vector<double> x;
    x.reserve(count_);
    for (std::size_t i = 0; i < count_; ++i) x.push_back(left(i) + step_ / 2.0);
    return x;
  }

 private:
  double left_, step_;
  std::size_t count_;
};

template <typename T>
std::vector<std::string> places_of(const std::vector<T>& entries) {
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const T& entry : entries) names.push_back(entry.place);
  return names;
}

std::string width_name(std::size_t width) { return width == kExactWidth ? "16" : std::to_string(width); }

}  // namespace

std::string width_chart(const std::string& label, const std::vector<WidthSlice>& slices) {
  constexpr double kDigit = 9.0;  // width that a number needs; narrower columns have colors and the legend alone
  const Frame frame;
  const Columns columns(frame, slices.size());
  const Scale scale{.low = 0.0, .high = 100.0, .from = frame.bottom(), .to = frame.top};
  Svg svg(frame.width, frame.height, label);
  draw_y_axis(svg, frame, scale);
  const double gap = std::min(1.5, columns.step() / 8.0);
  for (std::size_t i = 0; i < slices.size(); ++i) {
    double below = 0.0;
    for (std::size_t width = 0; width < slices[i].share.size(); ++width) {
      const double share = 100.0 * slices[i].share[width];
      if (share <= 0.0) continue;
      const double top = scale(below + share), height = scale(below) - top;
      svg.rect({columns.left(i) + gap, top}, columns.step() - 2.0 * gap, height, fmt::format("w{}", width),
               fmt::format("layer {}: {} bits for {}% of the channels", slices[i].place, width_name(width),
                           html_number(share)));
      if (columns.step() >= kDigit && height >= kDigit + 1.0)
        svg.text({columns.left(i) + columns.step() / 2.0, top + height / 2.0 + 3.5}, fmt::format("mid on t{}", width),
                 width_name(width));
      below += share;
    }
  }
  draw_x_places(svg, frame, columns.centers(), places_of(slices), "layer");
  return svg.str();
}

std::string width_legend(const std::vector<WidthSlice>& slices) {
  std::string html = "<p class=\"legend\">";
  for (std::size_t width = 0; width <= kExactWidth; ++width)
    if (std::any_of(slices.begin(), slices.end(), [&](const WidthSlice& slice) { return slice.share[width] > 0.0; }))
      html += fmt::format("<span class=\"swatch b{} t{}\">{}</span> ", width, width, width_name(width));
  return html + "bits a channel</p>\n";
}

std::string byte_chart(const std::string& label, const std::vector<ByteBar>& bars) {
  const Frame frame{.plot_width = 296.0};
  std::vector<double> values{0.0};
  for (const ByteBar& bar : bars) values.insert(values.end(), {bar.keys + bar.values, bar.exact});
  const Scale scale = scale_for(values, frame.bottom(), frame.top, false);
  const Columns columns(frame, bars.size());
  Svg svg(frame.width, frame.height, label);
  draw_y_axis(svg, frame, scale);
  const double gap = std::min(10.0, columns.step() / 6.0), width = columns.step() - 2.0 * gap;
  for (std::size_t i = 0; i < bars.size(); ++i) {
    const ByteBar& bar = bars[i];
    const double left = columns.left(i) + gap, keys = scale(bar.keys), both = scale(bar.keys + bar.values),
                 exact = scale(bar.exact);
    svg.rect({left, keys}, width, frame.bottom() - keys, "fill sk",
             fmt::format("layer {}: keys {} bytes", bar.place, html_number(bar.keys)));
    if (bar.values > 0.0)
      svg.rect({left, both}, width, keys - both, "fill sv",
               fmt::format("layer {}: values {} bytes", bar.place, html_number(bar.values)));
    svg.line({columns.left(i), exact}, {columns.left(i) + columns.step(), exact}, "level");
  }
  const ByteBar& last = bars.back();
  const double at = frame.right() + 8.0, key_label = scale(last.keys / 2.0) + 4.0;
  const auto key = [&](double y, const char* css, const char* name) {
    svg.rect({at, y - 7.0}, 7.0, 7.0, css);
    svg.text({at + 11.0, y}, "", name);
  };
  svg.text({at, std::max(frame.top + 8.0, scale(last.exact) + 4.0)}, "", "bf16");
  key(key_label, "fill sk", "keys");
  if (last.values > 0.0)
    key(std::min(scale(last.keys + last.values / 2.0) + 4.0, key_label - 12.0), "fill sv", "values");
  draw_x_places(svg, frame, columns.centers(), places_of(bars), "layer");
  return svg.str();
}

}  // namespace kvq
