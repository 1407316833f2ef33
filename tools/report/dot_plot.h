#pragma once

#include <string>
#include <vector>

namespace kvq {

/// One line of a dot plot.
struct DotRow {
  std::string name;
  double value = 0.0;  ///< no dot unless above 0 and finite
  int style = 0;
  bool strong = false;  ///< bold: the artifact that the report is about
};

struct DotPlot {
  std::string label;  ///< text for screen readers
  std::string x_title;
  std::vector<DotRow> rows;
};

/// SVG with a logarithmic x axis: a name, a dot and a number in each line, so that nothing covers a dot.
std::string dot_plot(const DotPlot& plot);

}  // namespace kvq
