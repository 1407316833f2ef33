#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

struct Point {
  double x = 0.0, y = 0.0;
};

/// A drawing inside the page. It has a viewBox and no size, so it is as wide as its place; colours and dashes are the
/// classes of html_style.cpp, which know light, dark and paper. All text is escaped here.
class Svg {
 public:
  /// @param label  what a screen reader says in place of the picture
  Svg(double width, double height, std::string_view label);

  void line(Point a, Point b, std::string_view css);
  void rect(Point corner, double width, double height, std::string_view css, std::string_view title = {});
  void text(Point at, std::string_view css, std::string_view text);
  void polyline(std::span<const Point> points, std::string_view css);
  void polygon(std::span<const Point> points, std::string_view css);
  /// The eight shapes of series, by `style`. @param title  what shows under the pointer
  void marker(Point at, int style, std::string_view css, std::string_view title = {});

  std::string str() const { return html_ + "</svg>\n"; }

 private:
  void shape(std::string_view element, std::string_view attributes, std::string_view css, std::string_view title);
  std::string html_;
};

/// Classes of a series: one of eight colours, and dashes that tell the first eight series from the second and third.
std::string series_css(int style);
constexpr int kMostStyles = 24;

/// Values to units of the drawing. `low` < `high`.
struct Scale {
  double low = 0.0, high = 1.0;
  double from = 0.0, to = 1.0;
  bool log = false;
  bool shows(double value) const;
  double operator()(double value) const;
};

/// A scale whose ends are round numbers around the values that it can show; 0 to 1, or 0.1 to 1, if there are none.
Scale scale_for(std::span<const double> values, double from, double to, bool log);

struct Tick {
  double value = 0.0;
  std::string label;
};
std::vector<Tick> ticks_of(const Scale& scale);

}  // namespace kvq
