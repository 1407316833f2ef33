#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>

namespace kvq {

/// A capped score: limit tanh(score / limit).
/// @param limit  above 0; in the unit of the score
__device__ __forceinline__ float capped(float score, float limit) {
  // tanh(y) = 1 - 2 / (e^2y + 1), which is exact enough, because an error counts relative to the limit. (e^2y may
  // overflow: then the quotient is 0.)
  const float quotient = 2.0f * ptx::rcp_approx(ptx::ex2(score * __fdividef(2.0f * kLog2e, limit)) + 1.0f);
  return limit * (1.0f - quotient);
}

}  // namespace kvq
