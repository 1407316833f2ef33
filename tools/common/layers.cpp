#include "common/layers.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

std::string range_text(const std::vector<int>& layers) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < layers.size(); begin = end) {
    end = begin + 1;
    while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", layers[begin],
                        end - begin > 1 ? fmt::format("-{}", layers[end - 1]) : "");
  }
  return text;
}

std::vector<int> layers_without(const std::vector<int>& present, int num_layers) {
  std::vector<int> missing;
  for (int layer = 0; layer < num_layers; ++layer)
    if (!std::binary_search(present.begin(), present.end(), layer)) missing.push_back(layer);
  return missing;
}

}  // namespace kvq
