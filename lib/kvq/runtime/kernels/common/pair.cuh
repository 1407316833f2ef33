#pragma once

#include <kvq/device/convert.cuh>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>

/// Numbers of 16 bits, alone and two to a word, and sums in the order of packing.md.
namespace kvq {

/// Two 16-bit numbers, infinities replaced by NaN. @param exponent  the bits of an exponent
__device__ __forceinline__ unsigned infinite_to_nan(unsigned two, unsigned exponent) {
  const unsigned high = exponent << 16;
  return two | ((two & exponent) == exponent ? 0x7FFFu : 0u) | ((two & high) == high ? 0x7FFF0000u : 0u);
}

/// Operations on pairs of the two 16-bit types.
template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static constexpr unsigned kOne = 0x3F80, kExponent = 0x7F80;
  static __device__ __forceinline__ float2 to_float(unsigned bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  }
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&two);
  }
  /// As from_float(): the range of floats is that of bfloat16.
  static __device__ __forceinline__ unsigned pack_saturated(float low, float high) { return pack(low, high); }
  static __device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    const __nv_bfloat162 c =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&c);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
  }
};
template <>
struct Pair<__half> {
  static constexpr unsigned kOne = 0x3C00, kExponent = 0x7C00;
  static __device__ __forceinline__ float2 to_float(unsigned bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
  }
  static __device__ __forceinline__ unsigned pack(float low, float high) {
    const __half2 two = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&two);
  }
  /// Saturates at the largest finite number, as from_float() does.
  static __device__ __forceinline__ unsigned pack_saturated(float low, float high) {
    return pack(saturated_to_half(low), saturated_to_half(high));
  }
  static __device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
    const __half2 c = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const unsigned*>(&c);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
    ptx::mma_m16n8k16_fp16(c, a0, a1, a2, a3, b0, b1);
  }
};

/// Eight numbers of queries, infinities replaced by NaN: an infinite score below all others would hide.
template <typename T>
__device__ __forceinline__ uint4 infinite_to_nan(uint4 eight) {
  constexpr unsigned kExponent = Pair<T>::kExponent;
  return make_uint4(infinite_to_nan(eight.x, kExponent), infinite_to_nan(eight.y, kExponent),
                    infinite_to_nan(eight.z, kExponent), infinite_to_nan(eight.w, kExponent));
}

/// Two numbers as bfloat16; saturates at the largest finite number, as the codec does.
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  const __nv_bfloat162 most = __halves2bfloat162(__ushort_as_bfloat16(0x7F7F), __ushort_as_bfloat16(0x7F7F));
  const __nv_bfloat162 two = __hmin2_nan(__hmax2_nan(__floats2bfloat162_rn(low, high), __hneg2(most)), most);
  return *reinterpret_cast<const unsigned*>(&two);
}

/// R of packing.md: the number as stored, and its bits. @tparam kBfloat  stored as bfloat16, else as fp16
template <bool kBfloat>
__device__ __forceinline__ float stored(float x, unsigned short& bits) {
  if constexpr (kBfloat) {
    __nv_bfloat16 y = __float2bfloat16_rn(x);
    if (__hisinf(y)) y = __ushort_as_bfloat16(static_cast<unsigned short>(0x7F7Fu | (x < 0.0f ? 0x8000u : 0u)));
    bits = __bfloat16_as_ushort(y);
    return __bfloat162float(y);
  } else {
    const __half y = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
    bits = __half_as_ushort(y);
    return __half2float(y);
  }
}

/// tree() of packing.md of a lane's terms, a power of two: neighbors first.
template <int kTerms>
__device__ __forceinline__ float tree_sum(const float (&y)[kTerms]) {
  float sums[kTerms];
#pragma unroll
  for (int i = 0; i < kTerms; ++i) sums[i] = y[i];
#pragma unroll
  for (int half = 1; half < kTerms; half *= 2)
#pragma unroll
    for (int i = 0; i < kTerms; i += 2 * half) sums[i] = __fadd_rn(sums[i], sums[i + half]);
  return sums[0];
}

}  // namespace kvq
