#pragma once

#include <kvq/runtime/kernels/common/format.h>
#include <kvq/device/convert.cuh>

#include <cstddef>

/// Shared by the generic kernels: scales and minima, and tiles of run-time formats.
namespace kvq::generic {

constexpr unsigned kAll = ~0u;
constexpr int kThreads = 128, kWarps = kThreads / 32;

/// A scale or minimum from its bits.
__device__ __forceinline__ float number(unsigned bits, bool bfloat) {
  return bfloat ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/// Scale and minimum of a group: a code c is dequantized as c * scale + minimum.
struct Numbers {
  float scale, minimum;
  /// @param bits  scale, and above it the minimum of affine codes
  __device__ __forceinline__ Numbers(unsigned bits, const TileSide& side, bool bfloat)
      : scale(number(bits & 0xFFFFu, bfloat)),
        minimum(side.numbers == 2 ? number(bits >> 16, bfloat)
                                  : scale * (-0.5f * static_cast<float>((1 << side.bits) - 1))) {}
};

/// Group of a step of 32 channels, 0..7, without the slow division.
struct GroupOfStep {
  unsigned factor;
  __device__ __forceinline__ explicit GroupOfStep(const TileSide& side)
      : factor((256u + static_cast<unsigned>(side.group_size) / 32 - 1) /
               (static_cast<unsigned>(side.group_size) / 32)) {}
  __device__ __forceinline__ int operator()(int step) const {
    return static_cast<int>(static_cast<unsigned>(step) * factor >> 8);
  }
};

}  // namespace kvq::generic
