#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>

namespace kvq {

/// A capped score: limit tanh(score / limit).
/// @param limit  above 0; in the unit of the score
__device__ __forceinline__ float capped(float score, float limit) {
  // tanh(y) = 1 - 2 / (e^2y + 1) has an error relative to 1, that of the limit. So small y take the first terms of the
  // series instead, whose error is relative to y. (e^2y may overflow: then the quotient is 0.)
  const float y = __fdividef(score, limit), square = y * y;
  const float series = y * fmaf(square, fmaf(square, fmaf(square, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1.0f);
  const float quotient = 2.0f * ptx::rcp_approx(ptx::ex2(y * (2.0f * kLog2e)) + 1.0f);
  return limit * (fabsf(y) < 0.125f ? series : 1.0f - quotient);
}

}  // namespace kvq
