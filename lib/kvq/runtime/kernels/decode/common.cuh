#pragma once

#include <kvq/device/async_copy.cuh>
#include <kvq/device/convert.cuh>
#include <kvq/device/ptx.cuh>

/// Constants and functions that all files of the decode kernels share.
namespace kvq::decode {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kMinusInf = -__builtin_huge_valf();
constexpr unsigned kAll = ~0u;

/// sum += factor x
__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x), sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z), sum.w = fmaf(factor, x.w, sum.w);
}

/// x in bfloat16, or the rounding error, if `low`.
__device__ __forceinline__ unsigned half_of(float x, bool low) {
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  return __bfloat16_as_ushort(low ? __float2bfloat16_rn(x - __bfloat162float(high)) : high);
}

}  // namespace kvq::decode
