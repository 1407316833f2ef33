#pragma once

#include <kvq/runtime/kernels/common/side_traits.h>
#include <kvq/runtime/kernels/common/pair.cuh>

/// The registers of a warp for 16 tokens of one head and side.
namespace kvq::write {

constexpr int kWarps = 4;

/// False for NaN and infinities, which poison a row (packing.md, "Rows that are not finite").
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.40282347e38f; }

/// Call before any global memory is read or written that other kernels write or read. The next kernel of the stream may
/// start and run up to the same point while this one runs.
/// @param holds_next  the next kernel starts only when the kernels before this one have ended, because it reads what
///                    they write without waiting itself
__device__ __forceinline__ void wait_for_kernels_before(bool holds_next) {
  if (!holds_next) ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (holds_next) ptx::griddepcontrol_launch_dependents();
}

template <typename Side>
struct Rows {
  static constexpr int kSteps = Side::kHeadDim / 32;
  float x[2][kSteps][8];   ///< tokens g and g + 8
  float row_scale = 1.0f;  ///< x_rot = x * row_scale
  int clip_rank = 0;     ///< rows are clipped to their largest magnitude of this rank (1: the largest); 0: not clipped
  bool rotated = false;  ///< x has rounding errors of a rotation, so the faster encode_rotated.cuh is allowed
};

}  // namespace kvq::write
