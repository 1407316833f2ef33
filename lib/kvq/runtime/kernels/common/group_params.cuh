#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/device/convert.cuh>

#include <cstddef>

/// Group parameters: the scale of each group of a token's codes, and the minimum or zero point of affine codes.
namespace kvq {

/// A scale or minimum from its bits.
__device__ __forceinline__ float group_param(unsigned bits, bool bfloat) {
  return bfloat ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/// Two of them from a word.
template <typename Side>
__device__ __forceinline__ float2 two_group_params(unsigned bits) {
  if constexpr (Side::kBfloat)
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

/// Scales of a group of the tokens g and g + 8, and minima if affine.
template <typename Side>
struct GroupParams {
  float scale[2], minimum[2];
  __device__ __forceinline__ GroupParams(const unsigned char* tile_side, int group, int g) {
    const unsigned char* at = tile_side + Side::side().code_bytes() + (group * 8 + g) * 4 * Side::kGroupParams;
    if constexpr (Side::kAffine) {
      const uint2 bits = *reinterpret_cast<const uint2*>(at);
      const float2 a = two_group_params<Side>(bits.x), b = two_group_params<Side>(bits.y);
      scale[0] = a.x, minimum[0] = a.y, scale[1] = b.x, minimum[1] = b.y;
    } else {
      const float2 a = two_group_params<Side>(*reinterpret_cast<const unsigned*>(at));
      scale[0] = a.x, scale[1] = a.y, minimum[0] = minimum[1] = 0.0f;
    }
  }
};

namespace generic {

/// A number of a format that is known at run time.
__device__ __forceinline__ float number_at(const std::byte* at, const TileSide& side, bool bfloat) {
  if (side.number_size == 4) return *reinterpret_cast<const float*>(at);
  return group_param(*reinterpret_cast<const unsigned short*>(at), bfloat);
}

/// Those of a format that is known at run time.
struct GroupParams {
  float scale, second;  ///< `second`: the value of code 0 or, if integer_zero, the zero point
  bool integer_zero;
  /// @param at  of the scale
  __device__ __forceinline__ GroupParams(const std::byte* at, const TileSide& side, bool bfloat)
      : scale(number_at(at, side, bfloat)),
        second(side.numbers == 2 ? number_at(at + side.number_size, side, bfloat)
                                 : scale * (-0.5f * static_cast<float>((1 << side.bits) - 1))),
        integer_zero(side.integer_zero) {}
  __device__ __forceinline__ float value(float code) const {
    return integer_zero ? (code - second) * scale : fmaf(code, scale, second);
  }
  /// The value of code 0.
  __device__ __forceinline__ float minimum() const { return integer_zero ? -second * scale : second; }
};

}  // namespace generic

}  // namespace kvq
