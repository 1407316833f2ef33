#pragma once

#include <string>
#include <utility>
#include <vector>

namespace kvq {

/// One line of a chart. The line has a gap at NaN, and on a logarithmic axis at 0.
struct ChartLine {
  std::string name;
  std::vector<double> values;
  int style = 0;
  bool strong = false;                      ///< bold: the artifact that the report is about
  std::vector<double> low = {}, high = {};  ///< a band around the line, or empty
};

/// A line chart whose x axis has named places: layers, contexts.
struct LineChart {
  std::string label;  ///< text for screen readers
  std::string x_title;
  std::vector<std::string> places;
  std::vector<double> x = {};  ///< x of the places; empty: evenly spaced
  std::vector<ChartLine> lines;
  bool log = true;
  bool small = false;                 ///< one of many charts: no markers, no names, few ticks
  std::vector<double> scale_of = {};  ///< values that set the range of the y axis; empty: those of the lines
};

/// SVG, with each line's name beside the line's end.
std::string line_chart(const LineChart& chart);

}  // namespace kvq
