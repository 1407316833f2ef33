#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/// Conversions between activations and floats. fp16 saturates at its largest finite number instead of infinity; NaN
/// stays NaN.
namespace kvq {

/// x as fp16 holds it, without rounding.
__device__ __forceinline__ float saturated_to_half(float x) {
  return x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f);
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(saturated_to_half(x)); }

}  // namespace kvq
