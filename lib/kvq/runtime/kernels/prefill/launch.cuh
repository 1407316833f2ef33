#pragma once

#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/prefill/kernel.cuh>
#include <kvq/runtime/kernels/prefill/sm90_kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace kvq {

/// Does this build contain code for architecture 90a? (lib/kvq/runtime/CMakeLists.txt)
#ifdef KVQ_SM90A
constexpr bool kHaveSm90a = true;
#else
constexpr bool kHaveSm90a = false;
#endif

/// Loads a kernel and raises its limit of dynamic shared memory.
template <typename... Arguments>
cudaError_t prepare_prefill(void (*kernel)(Arguments...), int shared_bytes) {
  const cudaError_t error = load_kernel(kernel);
  return error != cudaSuccess ? error
                              : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

template <int kDim, typename T>
Status plan_prefill(const DequantizeVariant& rows, PrefillLaunch& launch) {
  using Sm90 = prefill::Sm90Traits<kDim, T>;
  using Any = prefill::PortableTraits<kDim, T>;
  constexpr PrefillTiles kTiles{kDim};
  static_assert(sizeof(typename Any::Shared) <= 99 * 1024, "what a block has on every architecture");
  static_assert(sizeof(typename Sm90::Shared) <= 99 * 1024);
  const Status status = rows.plan(launch.dequantize);
  if (!status.ok()) return status;
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  launch.sm90 = kHaveSm90a && major == 9 && minor == 0 && !launch.shape.portable;
  launch.shared_bytes = static_cast<int>(launch.sm90 ? sizeof(typename Sm90::Shared) : sizeof(typename Any::Shared));
  if (error == cudaSuccess)
    error = launch.sm90 ? prepare_prefill(prefill::prefill_sm90_kernel<Sm90>, launch.shared_bytes)
                        : prepare_prefill(prefill::prefill_kernel<Any>, launch.shared_bytes);
  if (error != cudaSuccess) return cuda_status(error, "prefill: plan");

  take_slab(launch, launch.sm90 ? Sm90::kRows : Any::kRows, kTiles.tokens(), kTiles.bytes());
  return {};
}

template <int kDim, typename T>
Status run_prefill(const DequantizeVariant& rows, const PrefillLaunch& launch, const PrefillParams& params,
                   CUstream_st* stream) {
  using Sm90 = prefill::Sm90Traits<kDim, T>;
  using Any = prefill::PortableTraits<kDim, T>;
  const int work_tiles = params.cache.batch * params.cache.num_kv_heads;
  PrefillSlab slab = launch.slab;
  if (slab.row_blocks == 0 || slab.tiles == 0) return {};
  for (slab.first_work_tile = 0; slab.first_work_tile < work_tiles; slab.first_work_tile += launch.slab.work_tiles) {
    slab.work_tiles = std::min(launch.slab.work_tiles, work_tiles - slab.first_work_tile);
    const Status status = rows.to_tiles(launch.dequantize, params, slab, stream);
    if (!status.ok()) return status;
    const dim3 blocks(static_cast<unsigned>(slab.work_tiles * slab.row_blocks));
    const cudaError_t error = launch.sm90 ? launch_kernel(prefill::prefill_sm90_kernel<Sm90>, blocks, Sm90::kThreads,
                                                          launch.shared_bytes, false, stream, params, slab)
                                          : launch_kernel(prefill::prefill_kernel<Any>, blocks, Any::kThreads,
                                                          launch.shared_bytes, false, stream, params, slab);
    if (error != cudaSuccess) return cuda_status(error, "prefill: launch");
  }
  return {};
}

template <int kDim, typename T>
PrefillVariant prefill_variant(const char* name) {
  return {name, kDim, std::is_same_v<T, __nv_bfloat16>, plan_prefill<kDim, T>, run_prefill<kDim, T>};
}

}  // namespace kvq
