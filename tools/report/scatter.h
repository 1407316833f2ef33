#pragma once

#include <string>
#include <vector>

namespace kvq {

struct ChartPoint {
  std::string name;
  double x = 0.0, y = 0.0;
  int style = 0;
  bool strong = false;    ///< what the report is about
  bool on_front = false;  ///< no other point has less of both
};

/// Marks which points no other one dominates: at most as much of both, and less of one. Points that are no numbers
/// never are.
void mark_front(std::vector<ChartPoint>& points);

struct ScatterChart {
  std::string label, x_title;
  std::vector<ChartPoint> points;
};

/// SVG: y on a logarithmic axis, the front's points filled and joined, names where they have room.
std::string scatter_chart(const ScatterChart& chart);

}  // namespace kvq
