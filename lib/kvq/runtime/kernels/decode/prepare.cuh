#pragma once

#include <kvq/runtime/kernels/common/page_view.h>
#include <kvq/device/launch.cuh>

#include <cuda_runtime.h>

#include <cstddef>

/// What launches of all kernels of a decode call have in common.
namespace kvq {

/// Bytes of shared memory that a block may have on every architecture.
inline constexpr std::size_t kMostDecodeShared = 99 * 1024;

/// Loads a kernel onto the current device and sets its shared memory.
/// @param overlapping  result of load_kernel()
template <typename Kernel>
cudaError_t prepare_decode_kernel(Kernel kernel, std::size_t shared_bytes, bool& overlapping) {
  cudaError_t error = load_kernel(kernel, overlapping);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  // A multiprocessor changes its split between L1 and shared memory only while it is idle, so all kernels of a call
  // prefer the same carveout.
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return error;
}

/// Shared memory of a block that rotates: without room for a dense rotation if there is none.
/// @tparam Shared  QueriesShared or CombineShared
template <typename Shared>
int rotate_shared_bytes(const DeviceRotation& rotation) {
  return static_cast<int>(sizeof(Shared) - (rotation.matrix ? 0 : sizeof(typename Shared::Rotation::Held)));
}

}  // namespace kvq
