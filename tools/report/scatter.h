#pragma once

#include <string>
#include <vector>

namespace kvq {

struct ChartPoint {
  std::string name;
  double x = 0.0, y = 0.0;
  int style = 0;
  bool strong = false;    ///< bold: the artifact that the report is about
  bool on_front = false;  ///< on the Pareto front
};

/// Sets `on_front` for points that no other point dominates. A point dominates another if both coordinates are at most
/// as large and one is smaller. A point with NaN is never on the front.
void mark_front(std::vector<ChartPoint>& points);

struct ScatterChart {
  std::string label, x_title;
  std::vector<ChartPoint> points;
};

/// SVG with a logarithmic y axis. Points of the front are filled and joined by a line; names stand where they have
/// room.
std::string scatter_chart(const ScatterChart& chart);

}  // namespace kvq
