#include "report/axes.h"

#include "report/text.h"

#include <algorithm>

namespace kvq {

namespace {

constexpr double kCharacter = 6.2;

void draw_base(Svg& svg, const Frame& frame, const std::string& title) {
  svg.line({frame.left, frame.bottom()}, {frame.right(), frame.bottom()}, "axis");
  svg.text({(frame.left + frame.right()) / 2.0, frame.bottom() + 31.0}, "mid soft", title);
}

}  // namespace

void draw_y_axis(Svg& svg, const Frame& frame, const Scale& scale, std::size_t most_ticks) {
  const std::vector<Tick> ticks = ticks_of(scale);
  const std::size_t every = (ticks.size() + most_ticks - 1) / std::max<std::size_t>(1, most_ticks);
  for (std::size_t i = 0; i < ticks.size(); i += std::max<std::size_t>(1, every)) {
    const double y = scale(ticks[i].value);
    svg.line({frame.left, y}, {frame.right(), y}, "grid");
    svg.text({frame.left - 6.0, y + 3.5}, "end soft ytick", ticks[i].label);
  }
}

void draw_x_places(Svg& svg, const Frame& frame, const std::vector<double>& x, const std::vector<std::string>& names,
                   const std::string& title) {
  draw_base(svg, frame, title);
  std::size_t longest = 0;
  for (const std::string& name : names) longest = std::max(longest, num_characters(name));
  const double room = kCharacter * static_cast<double>(longest) + 4.0;
  double free_from = -1e9;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (x[i] < free_from || (i + 1 < names.size() && x[i] + room > x.back())) continue;
    svg.line({x[i], frame.bottom()}, {x[i], frame.bottom() + 3.0}, "axis");
    svg.text({x[i], frame.bottom() + 15.0}, "mid soft", names[i]);
    free_from = x[i] + room;
  }
}

void draw_x_axis(Svg& svg, const Frame& frame, const Scale& scale, const std::string& title) {
  draw_base(svg, frame, title);
  for (const Tick& tick : ticks_of(scale)) {
    const double x = scale(tick.value);
    svg.line({x, frame.top}, {x, frame.bottom() + 3.0}, "grid");
    svg.text({x, frame.bottom() + 15.0}, "mid soft xtick", tick.label);
  }
}

}  // namespace kvq
