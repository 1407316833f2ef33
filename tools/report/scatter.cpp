#include "report/scatter.h"

#include "common/stable_order.h"
#include "report/axes.h"
#include "report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace kvq {

namespace {

constexpr double kCharacter = 6.6, kLine = 11.0, kMark = 5.0;
constexpr std::size_t kLongestLabel = 20;

struct Box {
  double left, top, right, bottom;
  bool meets(const Box& other) const {
    return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
  }
  bool inside(const Box& other) const {
    return left >= other.left && right <= other.right && top >= other.top && bottom <= other.bottom;
  }
};

/// A position of a label beside its point.
struct LabelPlace {
  const char* css;
  double dx, dy;     ///< from the point to the text's anchor, which is on the base line
  double part_left;  ///< share of the text that lies left of the anchor
};
constexpr std::array<LabelPlace, 8> kLabelPlaces = {{{"", 8.0, 3.5, 0.0},
                                                     {"", 6.0, -5.0, 0.0},
                                                     {"mid", 0.0, -8.0, 0.5},
                                                     {"", 6.0, 12.0, 0.0},
                                                     {"end", -6.0, -5.0, 1.0},
                                                     {"mid", 0.0, 15.0, 0.5},
                                                     {"end", -8.0, 3.5, 1.0},
                                                     {"end", -6.0, 12.0, 1.0}}};

std::vector<double> column(const std::vector<ChartPoint>& points, double ChartPoint::* value) {
  std::vector<double> values;
  values.reserve(points.size());
  for (const ChartPoint& point : points) values.push_back(point.*value);
  return values;
}

class Drawing {
 public:
  explicit Drawing(const ScatterChart& chart)
      : chart_(chart),
        svg_(frame_.width, frame_.height, chart.label),
        x_(scale_for(column(chart.points, &ChartPoint::x), frame_.left + 24.0, frame_.right() - 24.0, false)),
        y_(scale_for(column(chart.points, &ChartPoint::y), frame_.bottom(), frame_.top, true)) {}

  std::string draw() {
    draw_y_axis(svg_, frame_, y_);
    draw_x_axis(svg_, frame_, x_, chart_.x_title);
    draw_front();
    std::vector<const ChartPoint*> shown;
    for (const ChartPoint& point : chart_.points)
      if (x_.shows(point.x) && y_.shows(point.y)) shown.push_back(&point);
    for (const ChartPoint* point : shown) {
      svg_.marker(place(*point), point->style, (point->on_front ? "mark " : "hollow ") + series_css(point->style),
                  fmt::format("{}: {} at {} bits", point->name, html_number(point->y), html_number(point->x)));
      const Point at = place(*point);
      taken_.push_back({at.x - kMark, at.y - kMark, at.x + kMark, at.y + kMark});
    }
    // Labels take their places in order: the report's artifact first, then the front, then all others.
    sort_stably(shown, [](const ChartPoint* a, const ChartPoint* b) { return rank(*a) < rank(*b); });
    for (const ChartPoint* point : shown) draw_label(*point);
    return svg_.str();
  }

 private:
  static int rank(const ChartPoint& point) { return point.strong ? 0 : point.on_front ? 1 : 2; }
  Point place(const ChartPoint& point) const { return {x_(point.x), y_(point.y)}; }

  void draw_front() {
    std::vector<Point> front;
    for (const ChartPoint& point : chart_.points)
      if (point.on_front && y_.shows(point.y)) front.push_back(place(point));
    std::sort(front.begin(), front.end(), [](Point a, Point b) { return a.x != b.x ? a.x < b.x : a.y < b.y; });
    if (front.size() > 1) svg_.polyline(front, "front");
  }

  void draw_label(const ChartPoint& point) {
    const std::string text = shortened(point.name, kLongestLabel);
    const double width = kCharacter * static_cast<double>(num_characters(text));
    const Box plot{frame_.left, frame_.top - 2.0, frame_.width, frame_.bottom()};
    for (std::size_t i = 0; i < kLabelPlaces.size(); ++i) {
      // The area left of and below a point on the front is empty, so such a point tries the places in reverse order.
      const LabelPlace& beside = kLabelPlaces[point.on_front ? kLabelPlaces.size() - 1 - i : i];
      const Point at{place(point).x + beside.dx, place(point).y + beside.dy};
      const Box box{at.x - beside.part_left * width, at.y - kLine + 2.0, at.x + (1.0 - beside.part_left) * width,
                    at.y + 2.0};
      if (!box.inside(plot) ||
          std::any_of(taken_.begin(), taken_.end(), [&](const Box& other) { return box.meets(other); }))
        continue;
      svg_.text(at, fmt::format("{}{}", beside.css, point.strong ? " strong" : ""), text);
      taken_.push_back(box);
      return;
    }
  }

  const ScatterChart& chart_;
  Frame frame_{.height = 268.0, .plot_height = 220.0};
  Svg svg_;
  Scale x_, y_;
  std::vector<Box> taken_;  ///< boxes of the points and labels drawn so far
};

}  // namespace

void mark_front(std::vector<ChartPoint>& points) {
  for (ChartPoint& own : points) {
    own.on_front = std::isfinite(own.x) && std::isfinite(own.y) &&
                   std::none_of(points.begin(), points.end(), [&](const ChartPoint& other) {
                     return other.x <= own.x && other.y <= own.y && (other.x < own.x || other.y < own.y);
                   });
  }
}

std::string scatter_chart(const ScatterChart& chart) { return Drawing(chart).draw(); }

}  // namespace kvq
