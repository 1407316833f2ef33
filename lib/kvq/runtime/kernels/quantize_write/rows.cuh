#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// The registers of a warp for 16 tokens of one head and side.
namespace kvq::write {

constexpr unsigned kAll = ~0u;
constexpr int kWarps = 4;

/// Call before any global memory is read or written that other kernels write or read. The next kernel of the stream may
/// start and run up to the same point while this one runs.
__device__ __forceinline__ void wait_for_kernels_before() {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
}

template <typename Side>
struct Rows {
  static constexpr int kSteps = Side::kHeadDim / 32;
  float x[2][kSteps][8];   ///< tokens g and g + 8
  float row_scale = 1.0f;  ///< x_rot = x * row_scale
  int clip_rank = 0;     ///< rows are clipped to their largest magnitude of this rank (1: the largest); 0: not clipped
  bool rotated = false;  ///< x has rounding errors of a rotation, so the faster encode_rotated.cuh is allowed
};

template <typename T>
struct Pair;
template <>
struct Pair<__nv_bfloat16> {
  static constexpr unsigned kOne = 0x3F80;
  static __device__ __forceinline__ float2 to_float(unsigned bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  }
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
  static constexpr unsigned kOne = 0x3C00;
  static __device__ __forceinline__ float2 to_float(unsigned bits) {
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
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

}  // namespace kvq::write
