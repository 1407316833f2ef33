#pragma once

#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/group_params.cuh>

/// Shared by the generic kernels: scales and minima, and tiles of run-time formats.
namespace kvq::generic {

constexpr int kThreads = 128, kWarps = kThreads / 32;

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
