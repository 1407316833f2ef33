#pragma once

#include <vector_types.h>

namespace kvq {

/// A partial result: for each row of a work tile the output, not yet divided by the softmax sum, and the softmax state,
/// in base 2. It does not depend on how keys and values are coded.
template <int kRows, int kHeadDim>
struct alignas(16) DecodePartial {
  float value[kRows][kHeadDim];
  float2 state[kRows];  ///< reference that exponentials are relative to, sum of exponentials
};

}  // namespace kvq
