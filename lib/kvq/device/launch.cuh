#pragma once

#include <kvq/device/cuda_status.h>

#include <cstddef>
#include <type_traits>

/// Kernels as the host sees them.
namespace kvq {

/// Loads a kernel on the current device, which else its first launch would do, be it captured or not.
/// @param can_overlap  may be launched early if it waits itself (ptx.cuh): code for earlier devices, run on a later
/// one, would not wait
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
/// @param overlaps  its blocks may come up while the stream's kernel before it still runs
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
