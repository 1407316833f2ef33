#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvq {

/// One line of a chart. NaN leaves a gap, and so does 0 on a logarithmic axis.
struct ChartLine {
  std::string name;
  std::vector<double> values;
  int style = 0;
  bool strong = false;                      ///< what the report is about
  std::vector<double> low = {}, high = {};  ///< a band around it, or empty
};

/// Lines over places with a name: layers, contexts.
struct LineChart {
  std::string label;  ///< what a screen reader says
  std::string x_title;
  std::vector<std::string> places;
  std::vector<double> x = {};  ///< of the places; empty: evenly spaced
  std::vector<ChartLine> lines;
  bool log = true;
  bool small = false;                 ///< one of many: no marks, no names, few ticks
  std::vector<double> scale_of = {};  ///< values that the axis has to hold; empty: those of the lines
};

/// SVG with each line's name beside its end.
std::string line_chart(const LineChart& chart);

}  // namespace kvq
