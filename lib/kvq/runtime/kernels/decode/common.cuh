#pragma once

#include <kvq/device/async_copy.cuh>
#include <kvq/device/convert.cuh>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>

/// Functions that all files of the decode kernels share.
namespace kvq::decode {

/// sum += factor x
__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

/// The bfloat16 parts of x: x rounded, or the rounding error, if `low`.
__device__ __forceinline__ unsigned part_of(float x, bool low) {
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  return __bfloat16_as_ushort(low ? __float2bfloat16_rn(x - __bfloat162float(high)) : high);
}

}  // namespace kvq::decode
