#include "report/axes.h"

#include "report/text.h"

#include <algorithm>

namespace kvq {

namespace {

constexpr double kCharacter = 6.2;
constexpr double kLogTitle = 18.0;  ///< room above the plot that the title of a logarithmic axis needs

void draw_base(Svg& svg, const Frame& frame, const std::string& title) {
  svg.line({frame.left, frame.bottom()}, {frame.right(), frame.bottom()}, "axis");
  svg.text({(frame.left + frame.right()) / 2.0, frame.bottom() + 31.0}, "mid soft", title);
}

}  // namespace

void draw_y_axis(Svg& svg, const Frame& frame, const Scale& scale, std::size_t most_ticks) {
  std::vector<Tick> ticks = ticks_of(scale);
  if (scale.log && ticks.size() > most_ticks) std::erase_if(ticks, [](const Tick& tick) { return !tick.decade; });
  if (scale.log && frame.top >= kLogTitle) svg.text({4.0, kLogTitle - 6.5}, "soft", "log scale");
  if (ticks.size() <= most_ticks)
    for (const double value : minor_places(scale))
      svg.line({frame.left, scale(value)}, {frame.right(), scale(value)}, "grid minor");
  const std::size_t every = std::max<std::size_t>(1, (ticks.size() + most_ticks - 1) / most_ticks);
  for (std::size_t i = 0; i < ticks.size(); i += every) {
    const double y = scale(ticks[i].value);
    svg.line({frame.left, y}, {frame.right(), y}, ticks[i].decade ? "grid decade" : "grid");
    svg.text({frame.left - 6.0, y + 3.5}, ticks[i].decade ? "end ytick decade" : "end soft ytick", ticks[i].label);
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
  for (const double value : minor_places(scale))
    svg.line({scale(value), frame.top}, {scale(value), frame.bottom()}, "grid minor");
  for (const Tick& tick : ticks_of(scale)) {
    const double x = scale(tick.value);
    svg.line({x, frame.top}, {x, frame.bottom() + 3.0}, tick.decade ? "grid decade" : "grid");
    svg.text({x, frame.bottom() + 15.0}, tick.decade ? "mid xtick decade" : "mid soft xtick", tick.label);
  }
}

}  // namespace kvq
