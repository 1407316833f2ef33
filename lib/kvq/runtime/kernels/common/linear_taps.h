#pragma once

#include <cstdint>

namespace kvq {

/// Theta of the linear rows of one side (plan/linear_rows.h), of each head its elements that are not 0, for decode. Of
/// keys: for each bit of a row, the channels of a rotated query that its number is a sum of. Of values: for each
/// channel, the places of bits (value_bit_of_place()) that it is a sum of. As many for each, those too many with weight
/// 0: a trellis of memory m has m + 1 channels for a bit.
struct LinearTaps {
  const float* weights = nullptr;          ///< [H, count, B] of keys, [H, count, D] of values; aligned to 16
  const std::uint16_t* sources = nullptr;  ///< likewise; aligned to 8
  int count = 0;
};

}  // namespace kvq
