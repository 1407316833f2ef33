#pragma once

#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/dequantize/kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace kvq {

/// Loads a kernel and raises its limit of dynamic shared memory. @param each  result: resident blocks a multiprocessor
template <typename T, typename Destination>
cudaError_t prepare_dequantize(int shared_bytes, int& each) {
  const auto kernel = dequantize::dequantize_kernel<T, Destination>;
  cudaError_t error = load_kernel(kernel);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  return error != cudaSuccess ? error
                              : cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, T::kThreads,
                                                                              static_cast<std::size_t>(shared_bytes));
}

template <typename T>
Status plan_dequantize(DequantizeLaunch& launch) {
  launch.shared_bytes = static_cast<int>(sizeof(typename T::Shared));
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = prepare_dequantize<T, dequantize::ToRows<T>>(launch.shared_bytes, each);
  if constexpr (T::kHeadDim % 64 == 0)
    if (error == cudaSuccess) error = prepare_dequantize<T, dequantize::ToTiles<T>>(launch.shared_bytes, each);
  launch.blocks = each * multiprocessors;
  return cuda_status(error, "dequantize: plan");
}

/// As many blocks as are resident at once, the same number for each head and side.
template <typename T, typename Destination>
Status launch_dequantize(const DequantizeLaunch& launch, const Destination& destination, CUstream_st* stream) {
  const int heads = destination.cache().num_kv_heads;
  if (destination.cache().batch == 0) return {};
  const dim3 grid(static_cast<unsigned>(std::max(1, launch.blocks / (2 * heads * T::kColumnBlocks))), T::kColumnBlocks,
                  static_cast<unsigned>(2 * heads));
  return cuda_status(launch_kernel(dequantize::dequantize_kernel<T, Destination>, grid, T::kThreads,
                                   launch.shared_bytes, false, stream, destination),
                     "dequantize: launch");
}

template <typename T>
Status run_dequantize(const DequantizeLaunch& launch, const DequantizeParams& params, CUstream_st* stream) {
  return launch_dequantize<T>(launch, dequantize::ToRows<T>{params}, stream);
}

template <typename T>
Status run_to_tiles(const DequantizeLaunch& launch, const PrefillParams& params, const PrefillSlab& slab,
                    CUstream_st* stream) {
  return launch_dequantize<T>(launch, dequantize::ToTiles<T>{params, slab}, stream);
}

template <typename K, typename V, typename Activation>
DequantizeVariant dequantize_variant(const char* name) {
  using T = dequantize::DequantizeTraits<K, V, Activation>;
  DequantizeVariant variant{name,
                            K::side(),
                            V::side(),
                            K::kBfloat,
                            V::kBfloat,
                            std::is_same_v<Activation, __nv_bfloat16>,
                            plan_dequantize<T>,
                            run_dequantize<T>};
  if constexpr (T::kHeadDim % 64 == 0) variant.to_tiles = run_to_tiles<T>;
  return variant;
}

}  // namespace kvq
