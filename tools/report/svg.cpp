#include "report/svg.h"

#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace kvq {

namespace {

/// Marker shapes around (0, 0), within 4 units, so that series differ without color.
constexpr std::array<const char*, 8> kShapes = {
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z",                             // disc
    "M-2.9 -2.9h5.8v5.8h-5.8z",                                                      // square
    "M0 -3.9l3.7 6.6h-7.4z",                                                         // triangle
    "M0 -4.1l4.1 4.1l-4.1 4.1l-4.1 -4.1z",                                           // diamond
    "M0 3.9l3.7 -6.6h-7.4z",                                                         // triangle, point down
    "M-1.3 -3.8h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5v-2.6h2.5z",                  // plus
    "M-2 -3.6l2 2l2 -2l1.6 1.6l-2 2l2 2l-1.6 1.6l-2 -2l-2 2l-1.6 -1.6l2 -2l-2 -2z",  // cross
    "M-4 -1.6h8v3.2h-8z"};                                                           // bar

std::string coordinates(std::span<const Point> points) {
  std::string text;
  for (const Point& point : points) text += fmt::format("{}{:.1f},{:.1f}", text.empty() ? "" : " ", point.x, point.y);
  return text;
}

std::string tick_label(double value) {
  if (value == 0.0 || (std::abs(value) >= 0.001 && std::abs(value) < 1e5)) return fmt::format("{:.4g}", value);
  const int exponent = static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-9));
  return fmt::format("{:.3g}e{}", value / std::pow(10.0, exponent), exponent);
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `value`.
double round_step(double value) {
  const double power = std::pow(10.0, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= value * (1.0 - 1e-9)) return factor * power;
  return 10.0 * power;
}

double linear_step(double low, double high) { return round_step((high - low) / 6.0); }

constexpr int kDecade = 3;  ///< ticks of a logarithmic axis in a decade

/// The ticks of a logarithmic axis by index: 1, 2 and 5 of each decade; index 0 is 1.
double log_place(int index) {
  const int decade = index >= 0 ? index / 3 : -((-index + 2) / 3);
  return std::array{1.0, 2.0, 5.0}[static_cast<std::size_t>(index - 3 * decade)] * std::pow(10.0, decade);
}

/// The index of the largest tick that is at most `value`.
int log_index(double value) {
  int index = 3 * static_cast<int>(std::floor(std::log10(value)));
  while (log_place(index + 1) <= value * (1.0 + 1e-9)) ++index;
  return index;
}

}  // namespace

Svg::Svg(double width, double height, std::string_view label)
    : html_(fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">\n", width, height,
                        html_text(label))) {}

void Svg::shape(std::string_view element, std::string_view attributes, std::string_view css, std::string_view title) {
  html_ += fmt::format("<{} class=\"{}\" {}", element, css, attributes);
  html_ += title.empty() ? "/>\n" : fmt::format("><title>{}</title></{}>\n", html_text(title), element);
}

void Svg::line(Point a, Point b, std::string_view css) {
  shape("line", fmt::format("x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"", a.x, a.y, b.x, b.y), css, {});
}

void Svg::rect(Point corner, double width, double height, std::string_view css, std::string_view title) {
  shape("rect",
        fmt::format("x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"", corner.x, corner.y, width, height),
        css, title);
}

void Svg::text(Point at, std::string_view css, std::string_view text) {
  html_ += fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", css, at.x, at.y, html_text(text));
}

void Svg::polyline(std::span<const Point> points, std::string_view css) {
  shape("polyline", fmt::format("points=\"{}\"", coordinates(points)), css, {});
}

void Svg::polygon(std::span<const Point> points, std::string_view css) {
  shape("polygon", fmt::format("points=\"{}\"", coordinates(points)), css, {});
}

void Svg::marker(Point at, int style, std::string_view css, std::string_view title) {
  const char* const path = kShapes[static_cast<std::size_t>(style) % kShapes.size()];
  shape("path", fmt::format("transform=\"translate({:.1f} {:.1f})\" d=\"{}\"", at.x, at.y, path), css, title);
}

std::string series_css(int style) {
  switch (style) {
    case kKeysStyle: return "sk d0";
    case kValuesStyle: return "sv d0";
    case kBaselineStyle: return "sb d1";
    default: return fmt::format("s{} d{}", style % 8, style / 8 % 3);
  }
}

bool Scale::shows(double value) const { return std::isfinite(value) && (!log || value > 0.0); }

double Scale::operator()(double value) const {
  const auto place = [&](double x) { return log ? std::log10(x) : x; };
  const double part = (place(value) - place(low)) / (place(high) - place(low));
  return from + std::clamp(part, 0.0, 1.0) * (to - from);
}

Scale scale_for(std::span<const double> values, double from, double to, bool log) {
  Scale scale{.low = log ? 0.1 : 0.0, .high = 1.0, .from = from, .to = to, .log = log};
  bool any = false;
  for (const double value : values) {
    if (!scale.shows(value)) continue;
    scale.low = any ? std::min(scale.low, value) : value;
    scale.high = any ? std::max(scale.high, value) : value;
    any = true;
  }
  if (log) {
    // Limits the range of the axis, because numbers near the limits of a double are not measured errors.
    scale.low = std::clamp(scale.low, 1e-30, 1e30);
    scale.high = std::clamp(scale.high, 1e-30, 1e30);
    int first = log_index(scale.low), last = log_index(scale.high);
    if (log_place(last) < scale.high * (1.0 - 1e-9) || last == first) ++last;
    // One end moves away after the other, so that the values stay in the middle.
    for (bool up = false; last - first < kDecade; up = !up) up ? ++last : --first;
    scale.low = log_place(first);
    scale.high = log_place(last);
    return scale;
  }
  scale.low = std::clamp(scale.low, -1e30, 1e30);
  scale.high = std::clamp(scale.high, -1e30, 1e30);
  const double spread = scale.high - scale.low, least = 0.05 * std::max(std::abs(scale.high), 1e-6);
  const double step = linear_step(0.0, std::max(spread, least));
  scale.low = step * std::floor(scale.low / step + 1e-9);
  scale.high = step * std::ceil(scale.high / step - 1e-9);
  if (!(scale.high > scale.low)) scale.high = scale.low + step;
  return scale;
}

std::vector<Tick> ticks_of(const Scale& scale) {
  std::vector<Tick> ticks;
  if (!scale.log) {
    const double step = linear_step(scale.low, scale.high);
    for (int i = 0; scale.low + i * step <= scale.high + 0.01 * step; ++i) {
      const double value = step * std::round((scale.low + i * step) / step);
      ticks.push_back({value, tick_label(value)});
    }
    return ticks;
  }
  const int first = log_index(scale.low), last = log_index(scale.high);
  const bool all = last - first <= 2 * kDecade;
  const int every = (last - first + 17) / 18;  // decades between two ticks
  for (int i = first; i <= last; ++i)
    if (all || i % (kDecade * every) == 0) ticks.push_back({log_place(i), tick_label(log_place(i)), i % kDecade == 0});
  return ticks;
}

std::vector<double> minor_places(const Scale& scale) {
  std::vector<double> places;
  if (!scale.log || scale.high / scale.low > 1e3 * (1.0 + 1e-9)) return places;
  for (int i = log_index(scale.low) / kDecade - 1; log_place(kDecade * i) < scale.high; ++i)
    for (const double factor : {3.0, 4.0, 6.0, 7.0, 8.0, 9.0})
      if (const double value = factor * log_place(kDecade * i); value > scale.low && value < scale.high)
        places.push_back(value);
  return places;
}

}  // namespace kvq
