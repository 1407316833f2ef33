#pragma once

#include <kvq/runtime/kernels/decode/kernel.cuh>

#include <cuda_runtime.h>

namespace kvq {

/// What a launch needs to know of one variant on one device.
struct DecodeLaunch {
  int blocks = 0;         ///< that run at once
  int shared_bytes = 0;
  int record_floats = 0;  ///< of a partial result
  int max_pieces = 0;     ///< of the line; two records each
};

template <typename T>
cudaError_t plan_decode_variant(int multiprocessors, DecodeLaunch& launch) {
  launch.shared_bytes = static_cast<int>(sizeof(typename T::Shared));
  launch.record_floats = static_cast<int>(sizeof(typename T::Record) / 4);
  static_assert(sizeof(typename T::Shared) <= 99 * 1024);
  cudaError_t error = cudaFuncSetAttribute(decode::decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
  if (error != cudaSuccess) return error;
  int each = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, decode::decode_kernel<T>, T::kBlockThreads, static_cast<std::size_t>(launch.shared_bytes));
  launch.blocks = each * multiprocessors;
  launch.max_pieces = launch.blocks * decode::Cut::kPiecesPerBlock;
  return error;
}

template <typename T>
cudaError_t launch_decode_variant(const DecodeLaunch& launch, const DecodeParams& params, cudaStream_t stream) {
  decode::decode_kernel<T><<<static_cast<unsigned>(launch.blocks), T::kBlockThreads, static_cast<std::size_t>(launch.shared_bytes), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace kvq
