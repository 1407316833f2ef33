#pragma once

#include <array>
#include <string>
#include <vector>

namespace kvq {

constexpr std::size_t kExactWidth = 9;  ///< behind the widths 0..8: channels that stay in 16 bits

/// One layer of the allocation fingerprint: the share of channels at each width.
struct WidthSlice {
  std::string place;
  std::array<double, kExactWidth + 1> share = {};
};
/// SVG: one slice a layer, narrow widths at the bottom (Block-GTQ, Figure 3). Bands carry colour and number.
std::string width_chart(const std::string& label, const std::vector<WidthSlice>& slices);
/// HTML: which colour is which width, for those that occur.
std::string width_legend(const std::vector<WidthSlice>& slices);

struct ByteBar {
  std::string place;
  double keys = 0.0, values = 0.0, exact = 0.0;
};
/// SVG: keys and values stacked, and a line at what exact rows take.
std::string byte_chart(const std::string& label, const std::vector<ByteBar>& bars);

}  // namespace kvq
