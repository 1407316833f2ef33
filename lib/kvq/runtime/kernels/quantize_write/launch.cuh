#pragma once

#include <kvq/runtime/kernels/quantize_write/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/quantize_write/dense.cuh>
#include <kvq/runtime/kernels/quantize_write/kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

namespace kvq {

inline cudaError_t count_multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) : error;
}

/// Launches a kernel that begins with wait_for_kernels_before(): where the device can, its blocks come up while the
/// stream's kernel before it ends.
template <typename... Arguments>
cudaError_t launch_early(void (*kernel)(Arguments...), dim3 grid, int threads, int shared_bytes, CUstream_st* stream,
                         std::type_identity_t<Arguments>... arguments) {
  bool can_overlap = false;
  const cudaError_t error = load_kernel(kernel, can_overlap);
  return error != cudaSuccess ? error
                              : launch_kernel(kernel, grid, threads, shared_bytes, can_overlap, stream, arguments...);
}

/// Blocks that share a job stay for as many tokens as come: as many as there are multiprocessors for.
template <typename K, typename V, typename T>
cudaError_t launch_dense_write(const WriteParams& params, int first_job, int jobs, CUstream_st* stream) {
  using Block = write::DenseBlock<K::kHeadDim>;
  int multiprocessors = 0;
  cudaError_t error = count_multiprocessors(multiprocessors);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(write::dense_write_kernel<K, V, T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 Block::kSharedBytes);
  if (error != cudaSuccess) return error;
  constexpr int kTokens = kTileTokens * Block::kWarps;
  const int runs = (params.num_tokens + kTokens - 1) / kTokens;
  const dim3 grid(static_cast<unsigned>(std::clamp(multiprocessors / jobs, 1, runs)), static_cast<unsigned>(jobs));
  return launch_early(write::dense_write_kernel<K, V, T>, grid, Block::kThreads, Block::kSharedBytes, stream, params,
                      first_job);
}

template <typename K, typename V, typename T>
cudaError_t launch_write(const WriteParams& params, int first_job, int jobs, CUstream_st* stream) {
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;
  const int tasks = (params.num_tokens + kTileTokens - 1) / kTileTokens * jobs;
  const int blocks = std::min((tasks + write::kWarps - 1) / write::kWarps,
                              multiprocessors * write::blocks_of_multiprocessor(K::kHeadDim));
  const int turn = blocks * write::kWarps;
  return launch_early(write::quantize_write_kernel<K, V, T>, dim3(static_cast<unsigned>(blocks)), 32 * write::kWarps, 0,
                      stream, params, first_job, jobs,
                      write::WriteTask{turn / params.num_kv_heads, turn % params.num_kv_heads});
}

/// Both sides in one launch if they are rotated in the same way, else one each.
template <typename K, typename V, typename T>
Status run_write(const WriteParams& params, CUstream_st* stream) {
  if (params.num_tokens == 0) return {};
  const int heads = params.num_kv_heads;
  const auto launch = [&](bool dense, int first_job, int jobs) {
    return dense ? launch_dense_write<K, V, T>(params, first_job, jobs, stream)
                 : launch_write<K, V, T>(params, first_job, jobs, stream);
  };
  const bool dense_k = params.k.rotation != nullptr, dense_v = params.v.rotation != nullptr;
  cudaError_t error = launch(dense_k, 0, dense_k == dense_v ? 2 * heads : heads);
  if (error == cudaSuccess && dense_k != dense_v) error = launch(dense_v, heads, heads);
  return error == cudaSuccess ? Status{}
                              : Status::fail(StatusCode::cuda, "quantize_write: launch: %s", cudaGetErrorString(error));
}

template <typename K, typename V, typename T>
WriteVariant write_variant(const char* name) {
  return {name, K::side(), V::side(), K::kBfloat, V::kBfloat, std::is_same_v<T, __nv_bfloat16>, run_write<K, V, T>};
}

}  // namespace kvq
