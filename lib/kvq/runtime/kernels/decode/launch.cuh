#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/decode/kernel.cuh>

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace kvq {

inline Status status_of(cudaError_t error, const char* what) {
  return error == cudaSuccess ? Status{} : Status::fail(StatusCode::cuda, "%s: %s", what, cudaGetErrorString(error));
}

template <typename T>
Status plan_decode(DecodeLaunch& launch) {
  launch.shared_bytes = static_cast<int>(sizeof(typename T::Shared));
  launch.record_floats = static_cast<int>(sizeof(typename T::Record) / sizeof(float));
  static_assert(sizeof(typename T::Shared) <= 99 * 1024, "what a block has on every architecture");
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(decode::decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 launch.shared_bytes);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, decode::decode_kernel<T>, T::kBlockThreads,
                                                          static_cast<std::size_t>(launch.shared_bytes));
  launch.blocks = each * multiprocessors;
  return status_of(error, "decode: plan");
}

template <typename T>
Status run_decode(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) {
  if (params.batch == 0) return {};
  decode::decode_kernel<T><<<static_cast<unsigned>(launch.blocks), T::kBlockThreads,
                             static_cast<std::size_t>(launch.shared_bytes), stream>>>(params);
  return status_of(cudaGetLastError(), "decode: launch");
}

template <typename T>
DecodeVariant decode_variant(const char* name) {
  return {name,
          T::KSide::side(),
          T::VSide::side(),
          T::KSide::kBfloat,
          T::VSide::kBfloat,
          T::kHeads,
          std::is_same_v<typename T::Activation, __nv_bfloat16>,
          plan_decode<T>,
          run_decode<T>};
}

}  // namespace kvq
