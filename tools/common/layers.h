#pragma once

#include <string>
#include <vector>

namespace kvq {

/// Sorted layer numbers as ranges: "0-3, 7".
std::string range_text(const std::vector<int>& layers);

/// Numbers from 0 to num_layers - 1 that `present` lacks. @param present  ascending
std::vector<int> layers_without(const std::vector<int>& present, int num_layers);

}  // namespace kvq
