#pragma once

#include <cstdint>

namespace kvq {

/// The elements of Theta that are not 0, for decode of the linear rows of one side (plan/linear_rows.h). An element is
/// a weight and its source. Of keys, the number of a query for a bit is the weighted sum of these channels of the
/// rotated query. Of values, a channel is the weighted sum of the sums at these places (value_bit_of_place()). Each
/// bit, or channel, has `count` elements; where Theta has fewer, the last weights are 0. A trellis of memory m has m +
/// 1 channels for a bit.
struct LinearTaps {
  const float* weights = nullptr;          ///< [H, count, B] of keys, [H, count, D] of values; aligned to 16
  const std::uint16_t* sources = nullptr;  ///< likewise
  int count = 0;
};

}  // namespace kvq
