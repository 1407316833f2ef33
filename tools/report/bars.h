#pragma once

#include <array>
#include <string>
#include <vector>

namespace kvq {

constexpr std::size_t kExactWidth = 9;  ///< after widths 0 to 8: channels in 16 bits

/// One layer of the width chart: the share of channels at each width.
struct WidthSlice {
  std::string place;
  std::array<double, kExactWidth + 1> share = {};
};
/// SVG: one column for each layer, narrow widths at the bottom (Block-GTQ, Figure 3). Each band has a color and a
/// number.
std::string width_chart(const std::string& label, const std::vector<WidthSlice>& slices);
/// HTML: the colors of the widths that occur.
std::string width_legend(const std::vector<WidthSlice>& slices);

struct ByteBar {
  std::string place;
  double keys = 0.0, values = 0.0, exact = 0.0;
};
/// SVG: bytes of keys and values stacked, and a line at the bytes of exact rows.
std::string byte_chart(const std::string& label, const std::vector<ByteBar>& bars);

}  // namespace kvq
