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

/// Stores the index of a token's centroid. One lane calls it.
__device__ __forceinline__ void store_index(const TileSide& side, std::byte* tile, int token, int index) {
  std::byte* at = tile + index_offset(side, token);
  if (side.index_bytes == 2)
    *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(index);
  else
    *at = static_cast<std::byte>(index);
}

/// The index of a token's centroid; in range, whatever the tile holds.
__device__ __forceinline__ int load_index(const TileSide& side, const std::byte* tile, int token, int num_centroids) {
  const std::byte* at = tile + index_offset(side, token);
  const int index =
      side.index_bytes == 2 ? static_cast<int>(*reinterpret_cast<const unsigned short*>(at)) : static_cast<int>(*at);
  return min(index, num_centroids - 1);
}

}  // namespace kvq::generic
