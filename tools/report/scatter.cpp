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

constexpr double kCharacter = 6.6, kStrongCharacter = 7.5;  ///< width of a character in wide fonts
constexpr double kAscent = 10.5, kDescent = 3.0;            ///< of the text's box around its base line
constexpr double kMark = 5.0, kGap = 2.0;
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

/// Whether the line from `a` to `b` passes through the box.
bool passes(Point a, Point b, const Box& box) {
  double first = 0.0, last = 1.0;  // part of the line that is inside
  const auto clip = [&](double start, double delta, double low, double high) {
    if (delta == 0.0) {
      if (start < low || start > high) last = -1.0;
      return;
    }
    const auto [enter, leave] = std::minmax({(low - start) / delta, (high - start) / delta});
    first = std::max(first, enter);
    last = std::min(last, leave);
  };
  clip(a.x, b.x - a.x, box.left, box.right);
  clip(a.y, b.y - a.y, box.top, box.bottom);
  return first <= last;
}

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
/// Places around a point that other labels surround; a line leads from the point to its label.
constexpr std::array<LabelPlace, 6> kFarPlaces = {{{"", 16.0, -14.0, 0.0},
                                                   {"", 16.0, 21.0, 0.0},
                                                   {"end", -16.0, -14.0, 1.0},
                                                   {"end", -16.0, 21.0, 1.0},
                                                   {"mid", 0.0, -24.0, 0.5},
                                                   {"mid", 0.0, 31.0, 0.5}}};

/// The values, and room for half a mark's width on both sides of the axis.
std::vector<double> with_room(std::vector<double> values) {
  constexpr double kRoom = 1.15;
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(values[i] * kRoom);
    values.push_back(values[i] / kRoom);
  }
  return values;
}

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
        y_(scale_for(with_room(column(chart.points, &ChartPoint::y)), frame_.bottom(), frame_.top, true)) {}

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
    for (const ChartPoint& point : chart_.points)
      if (point.on_front && y_.shows(point.y)) front_.push_back(place(point));
    std::sort(front_.begin(), front_.end(), [](Point a, Point b) { return a.x != b.x ? a.x < b.x : a.y < b.y; });
    if (front_.size() > 1) svg_.polyline(front_, "front");
  }

  /// Whether a label may stand in the box: nothing else is there.
  bool is_free(const Box& box) const {
    const Box plot{frame_.left, frame_.top - 2.0, frame_.width, frame_.bottom()};
    if (!box.inside(plot)) return false;
    if (std::any_of(taken_.begin(), taken_.end(), [&](const Box& other) { return box.meets(other); })) return false;
    const Box around{box.left - kGap, box.top - kGap, box.right + kGap, box.bottom + kGap};
    for (std::size_t i = 1; i < front_.size(); ++i)
      if (passes(front_[i - 1], front_[i], around)) return false;
    return true;
  }

  /// Writes the label if the place is free.
  bool try_place(const ChartPoint& point, const LabelPlace& beside, bool far) {
    const std::string text = shortened(point.name, kLongestLabel);
    const double width = (point.strong ? kStrongCharacter : kCharacter) * static_cast<double>(num_characters(text));
    const Point own = place(point), at{own.x + beside.dx, own.y + beside.dy};
    const Box box{at.x - beside.part_left * width, at.y - kAscent, at.x + (1.0 - beside.part_left) * width,
                  at.y + kDescent};
    if (!is_free(box)) return false;
    if (far) svg_.line(own, {at.x, beside.dy < 0.0 ? box.bottom : box.top}, "leader " + series_css(point.style));
    svg_.text(at, fmt::format("{}{}", beside.css, point.strong ? " strong" : ""), text);
    taken_.push_back(box);
    return true;
  }

  void draw_label(const ChartPoint& point) {
    for (std::size_t i = 0; i < kLabelPlaces.size(); ++i) {
      // The area left of and below a point on the front is empty, so such a point tries the places in reverse order.
      if (try_place(point, kLabelPlaces[point.on_front ? kLabelPlaces.size() - 1 - i : i], false)) return;
    }
    for (const LabelPlace& beside : kFarPlaces)
      if (try_place(point, beside, true)) return;
  }

  const ScatterChart& chart_;
  Frame frame_{.height = 278.0, .plot_height = 220.0};
  Svg svg_;
  Scale x_, y_;
  std::vector<Point> front_;  ///< from left to right
  std::vector<Box> taken_;    ///< boxes of the points and labels drawn so far
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
