#pragma once

#include <string>
#include <vector>

namespace kvq {

/// Shades for a table of numbers of one kind: by layer and head, by layer and scheme.
struct HeatMap {
  std::string label;  ///< text for screen readers
  std::string x_title, row_title;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<double>> values = {};  ///< [row][column]; a cell without a number above 0 stays empty
};

/// SVG, rows from top to bottom, with a legend of the shades; the shade is logarithmic in the value.
std::string heat_map(const HeatMap& map);

}  // namespace kvq
