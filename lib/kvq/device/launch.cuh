#pragma once

#include <kvq/device/cuda_status.h>

#include <cstddef>
#include <type_traits>

/// Loading and launching kernels from the host.
namespace kvq {

/// Loads a kernel onto the current device, so that its first launch, which may be captured, does not have to.
/// @param can_overlap  result: launch_kernel() may overlap the kernel with the one before. False for code of
/// architectures before 9.0, which does not contain griddepcontrol.wait (ptx.cuh)
template <typename... Arguments>
cudaError_t load_kernel(void (*kernel)(Arguments...), bool& can_overlap) {
  cudaFuncAttributes attributes = {};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  can_overlap = error == cudaSuccess && attributes.ptxVersion >= 90;
  return error;
}

template <typename... Arguments>
cudaError_t load_kernel(void (*kernel)(Arguments...)) {
  bool ignored;
  return load_kernel(kernel, ignored);
}

/// Enqueues a kernel.
/// @param overlaps  programmatic dependent launch: blocks may start while the stream's kernel before still runs
template <typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Arguments...), dim3 grid, int threads, int shared_bytes, bool overlaps,
                          CUstream_st* stream, std::type_identity_t<Arguments>... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace kvq
