#pragma once

#include <kvq/runtime/kernels/quantize_write/nearest.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/quantize_write/dense.cuh>
#include <kvq/runtime/kernels/quantize_write/kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

namespace kvq {

template <typename K, typename V, typename T>
Status plan_dense_write() {
  const auto dense = write::dense_write_kernel<K, V, T>;
  cudaError_t error = load_kernel(dense);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(dense, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 write::DenseBlock<K::kHeadDim>::kSharedBytes);
  return cuda_status(error, "quantize_write: plan");
}

/// Whether a format has centroids. The generic kernel applies dense rotations to its residuals.
template <typename K, typename V>
constexpr bool kHasCentroids = K::side().index_bytes > 0 || V::side().index_bytes > 0;

/// Loads the kernels for rotations by blocks.
template <typename K, typename V, typename T>
Status plan_block_write(WriteLaunch& launch) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = load_kernel(write::quantize_write_kernel<K, V, T, false>, launch.overlapping);
  if constexpr (!kHasCentroids<K, V>)
    if (error == cudaSuccess) error = load_kernel(write::quantize_write_kernel<K, V, T, true>, launch.overlapping);
  return cuda_status(error, "quantize_write: plan");
}

template <typename K, typename V, typename T>
Status plan_write(WriteLaunch& launch) {
  if constexpr (kHasCentroids<K, V>) {
    constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
    const Status status = generic_write(launch.format, kBf16).plan_kernel(launch);
    if (!status.ok()) return status;
  } else {
    const Status status = plan_dense_write<K, V, T>();
    if (!status.ok()) return status;
  }
  return plan_block_write<K, V, T>(launch);
}

/// WriteParams::row_parts of a call: as many warps divide 16 tokens as the device can run at once.
/// @param work  warps or blocks of the call if each takes 16 tokens alone
/// @param most  warps or blocks that run at once
template <typename Side>
int row_parts(std::int64_t work, std::int64_t most) {
  int parts = 1;
  if constexpr (write::QuantizesTwoRows<Side>)
    while (parts < kTileTokens / 2 && 2 * parts * work <= most) parts *= 2;
  return parts;
}

/// Warps of launch_write() that run at once.
template <typename Side>
std::int64_t resident_warps(const WriteLaunch& launch) {
  return std::int64_t{launch.multiprocessors} * write::blocks_of_multiprocessor(Side::kHeadDim) * write::kWarps;
}

/// The blocks of a job (a head of one side) loop over all tokens. A job has as many blocks as leave at most one block
/// for each multiprocessor, one at least.
template <typename K, typename V, typename T>
cudaError_t launch_dense_write(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs,
                               CUstream_st* stream) {
  using Block = write::DenseBlock<K::kHeadDim>;
  constexpr int kTokens = kTileTokens * Block::kWarps;
  const int runs = (params.num_tokens - 1) / kTokens + 1;
  const int most = launch.multiprocessors / jobs;
  WriteParams divided = params;
  divided.row_parts = row_parts<K>(runs, most);
  const dim3 grid(static_cast<unsigned>(std::clamp(most, 1, runs) * divided.row_parts), static_cast<unsigned>(jobs));
  return launch_kernel(write::dense_write_kernel<K, V, T>, grid, Block::kThreads, Block::kSharedBytes,
                       launch.overlapping, stream, divided, first_job);
}

template <typename K, typename V, typename T>
cudaError_t launch_write(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs,
                         CUstream_st* stream) {
  const int runs = (params.num_tokens - 1) / kTileTokens + 1;
  const auto blocks_for = [](std::int64_t warps) { return (warps + write::kWarps - 1) / write::kWarps; };
  const std::int64_t fill = resident_warps<K>(launch) / write::kWarps;
  WriteParams divided = params;
  divided.row_parts = row_parts<K>(std::int64_t{runs} * jobs, resident_warps<K>(launch));
  const auto blocks = static_cast<int>(
      std::min(blocks_for(std::int64_t{runs} * jobs * divided.row_parts), std::max(fill, blocks_for(jobs))));
  auto kernel = write::quantize_write_kernel<K, V, T, false>;
  if constexpr (!kHasCentroids<K, V>)
    if ((first_job > 0 ? params.v : params.k).factors) kernel = write::quantize_write_kernel<K, V, T, true>;
  const int stride = blocks * write::kWarps / (jobs * divided.row_parts), rest = runs % stride;
  const write::WriteRuns work{
      .end = runs,
      .stride = stride,
      .first_runs = params.window_mapping ? std::min(runs, params.sink_layout.rows / kTileTokens) : 0,
      .last_round = runs - rest,
      .idle = rest > 0 ? stride - rest : 0,
      .jobs = jobs,
      .both_sides = jobs > params.num_kv_heads,
      .values_only = first_job > 0,
  };
  return launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), 32 * write::kWarps, 0, launch.overlapping, stream,
                       divided, work);
}

/// How a side is rotated. Two sides of the same kind share a launch.
enum class WriteKind { blocks, scaled_blocks, dense };
inline WriteKind kind_of(const WriteSide& side) {
  return side.rotation ? WriteKind::dense : side.factors ? WriteKind::scaled_blocks : WriteKind::blocks;
}

/// One launch for both sides if they have the same WriteKind, else one for each.
template <typename K, typename V, typename T>
Status run_write(const WriteLaunch& launch, const WriteParams& given, CUstream_st* stream) {
  if (given.num_tokens == 0) return {};
  WriteParams params = given;
  const Status chosen = choose_centroids(launch, params, std::is_same_v<T, __nv_bfloat16>, stream);
  if (!chosen.ok()) return chosen;
  const int heads = params.num_kv_heads;
  const auto enqueue = [&](WriteKind kind, int first_job, int jobs) -> Status {
    if constexpr (kHasCentroids<K, V>) {
      Status status;
      for (const bool value : {false, true})
        if (kind == WriteKind::dense && status.ok() && (value ? first_job + jobs > heads : first_job == 0))
          status =
              run_generic_write(launch, params, value ? heads : 0, heads, std::is_same_v<T, __nv_bfloat16>, stream);
      if (kind == WriteKind::dense) return status;
    } else if (kind == WriteKind::dense) {
      return cuda_status(launch_dense_write<K, V, T>(launch, params, first_job, jobs, stream),
                         "quantize_write: launch");
    }
    return cuda_status(launch_write<K, V, T>(launch, params, first_job, jobs, stream), "quantize_write: launch");
  };
  const WriteKind k = kind_of(params.k), v = kind_of(params.v);
  const Status status = enqueue(k, 0, k == v ? 2 * heads : heads);
  return !status.ok() || k == v ? status : enqueue(v, heads, heads);
}

template <typename K, typename V, typename T>
WriteVariant write_variant(const char* name) {
  return {name,
          K::side(),
          V::side(),
          K::kBfloat,
          V::kBfloat,
          std::is_same_v<T, __nv_bfloat16>,
          plan_write<K, V, T>,
          run_write<K, V, T>};
}

}  // namespace kvq
