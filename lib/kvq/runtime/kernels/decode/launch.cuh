#pragma once

#include <kvq/runtime/kernels/decode/kernel.cuh>

#include <cuda_runtime.h>

namespace kvq {

/// What a launch needs to know of one variant on one device.
struct DecodeLaunch {
  int blocks = 0;         ///< that run at once, a multiple of `cluster`
  int cluster = 1;        ///< blocks that merge in shared memory
  int shared_bytes = 0;
  int record_floats = 0;  ///< of a partial result; two for each piece
};

/// @param cluster  1, or with compute capability 9.0 and later 2, 4, 8
template <typename T>
cudaError_t plan_decode_variant(int multiprocessors, int cluster, DecodeLaunch& launch) {
  launch.shared_bytes = static_cast<int>(sizeof(typename T::Shared));
  launch.record_floats = static_cast<int>(sizeof(typename T::Record) / 4);
  launch.cluster = cluster;
  static_assert(sizeof(typename T::Shared) <= 99 * 1024);
  cudaError_t error = cudaFuncSetAttribute(decode::decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
  if (error != cudaSuccess) return error;
  int each = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, decode::decode_kernel<T>, T::kThreads, static_cast<std::size_t>(launch.shared_bytes));
  launch.blocks = each * multiprocessors / cluster * cluster;
  return error;
}

template <typename T>
cudaError_t launch_decode_variant(const DecodeLaunch& launch, const DecodeParams& params, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(launch.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(launch.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = launch.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, decode::decode_kernel<T>, params);
}

}  // namespace kvq
