#pragma once

#include "report/svg.h"

#include <string>
#include <vector>

namespace kvq {

/// Position and size of a chart's plot inside its SVG drawing.
struct Frame {
  double width = 400.0, height = 248.0;  ///< at this width, text of 11 units is readable on a phone
  double left = 44.0, top = 20.0, plot_width = 350.0, plot_height = 190.0;
  double right() const { return left + plot_width; }
  double bottom() const { return top + plot_height; }
};

/// Draws grid lines and their numbers. A logarithmic axis says that it is one and sets off its powers of ten.
void draw_y_axis(Svg& svg, const Frame& frame, const Scale& scale, std::size_t most_ticks = 8);
/// Draws as many names below the plot as have room, and a title below the names.
void draw_x_places(Svg& svg, const Frame& frame, const std::vector<double>& x, const std::vector<std::string>& names,
                   const std::string& title);
void draw_x_axis(Svg& svg, const Frame& frame, const Scale& scale, const std::string& title);

}  // namespace kvq
