#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvq {

struct Point {
  double x = 0.0, y = 0.0;
};

/// An SVG drawing inside the page. It has a viewBox and no size, so it fills the width of its container. Colors and
/// dashes are CSS classes of style.cpp, which has rules for light mode, dark mode and paper. Svg escapes all text.
class Svg {
 public:
  /// @param label  text for screen readers
  Svg(double width, double height, std::string_view label);

  void line(Point a, Point b, std::string_view css);
  void rect(Point corner, double width, double height, std::string_view css, std::string_view title = {});
  void text(Point at, std::string_view css, std::string_view text);
  void polyline(std::span<const Point> points, std::string_view css);
  void polygon(std::span<const Point> points, std::string_view css);
  /// Draws one of the eight marker shapes. @param title  tooltip
  void marker(Point at, int style, std::string_view css, std::string_view title = {});

  std::string str() const { return html_ + "</svg>\n"; }

 private:
  void shape(std::string_view element, std::string_view attributes, std::string_view css, std::string_view title);
  std::string html_;
};

/// Styles of schemes: one of eight colors, and dashes, which differ for styles 0-7, 8-15 and 16-23. A color means the
/// same scheme in every chart of a page.
constexpr int kMostStyles = 24;
/// Styles of sides and of what a chart compares with: shades without color, because colors mean schemes.
constexpr int kKeysStyle = 24, kValuesStyle = 25, kBaselineStyle = 26;
/// CSS classes of a style.
std::string series_css(int style);

/// Maps values to units of the drawing. `low` < `high`.
struct Scale {
  double low = 0.0, high = 1.0;
  double from = 0.0, to = 1.0;
  bool log = false;
  bool shows(double value) const;
  double operator()(double value) const;
};

/// A scale with round ends around the values that it can show; 0 to 1 (logarithmic: 0.1 to 1) if there are none. A
/// logarithmic scale covers a decade at least, so that two numbers of its axis always show the decade.
Scale scale_for(std::span<const double> values, double from, double to, bool log);

struct Tick {
  double value = 0.0;
  std::string label;
  bool decade = false;  ///< a power of ten on a logarithmic scale
};
std::vector<Tick> ticks_of(const Scale& scale);
/// Places of a logarithmic scale between its ticks: 3, 4, 6 ... 9 times a power of ten; empty for a scale of many
/// decades.
std::vector<double> minor_places(const Scale& scale);

}  // namespace kvq
