#include <kvq/runtime/kernels/quantize_write/nearest.h>

#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/quantize_write/nearest.cuh>

#include <cuda_runtime.h>

namespace kvq {

namespace {

/// Calls f(std::integral_constant<int, head_dim>).
template <typename F>
cudaError_t with_head_dim(int head_dim, F f) {
  return head_dim == 64 ? f(std::integral_constant<int, 64>{}) : f(std::integral_constant<int, 128>{});
}

template <typename T>
cudaError_t load_kernels() {
  cudaError_t error = cudaSuccess;
  for (const int dim : {64, 128})
    if (error == cudaSuccess)
      error = with_head_dim(dim, [](auto d) {
        const cudaError_t first = load_kernel(write::nearest_centroid_kernel<T, d.value, 1>);
        return first == cudaSuccess ? load_kernel(write::nearest_centroid_kernel<T, d.value, write::kNearestWarps>)
                                    : first;
      });
  return error;
}

/// Many tokens: a block of 128 rows for each; few: blocks of 16 rows, so that more multiprocessors have work.
template <typename T, int kDim>
cudaError_t launch_jobs(const WriteLaunch& launch, const WriteParams& params, write::NearestJobs jobs,
                        CUstream_st* stream) {
  const auto blocks = [&](int rows) { return (params.num_tokens - 1) / rows + 1; };
  const auto grid = [&](int rows) {
    return dim3(static_cast<unsigned>(blocks(rows)), static_cast<unsigned>(jobs.keys + jobs.values));
  };
  constexpr int kMany = kTileTokens * write::kNearestWarps;
  if (std::int64_t{blocks(kMany)} * (jobs.keys + jobs.values) >= launch.multiprocessors)
    return launch_kernel(write::nearest_centroid_kernel<T, kDim, 1>, grid(kMany), write::kNearestThreads, 0, false,
                         stream, params, launch.format, jobs);
  return launch_kernel(write::nearest_centroid_kernel<T, kDim, write::kNearestWarps>, grid(kTileTokens),
                       write::kNearestThreads, 0, false, stream, params, launch.format, jobs);
}

template <typename T>
cudaError_t launch_nearest(const WriteLaunch& launch, const WriteParams& params, bool k, bool v, CUstream_st* stream) {
  const auto jobs_of = [&](bool has, const WriteSide& side) {
    return !has ? 0 : side.code.joint ? 1 : params.num_kv_heads;
  };
  const write::NearestJobs jobs{jobs_of(k, params.k), jobs_of(v, params.v)};
  const auto run = [&](int head_dim, write::NearestJobs some) {
    return with_head_dim(head_dim, [&](auto d) { return launch_jobs<T, d.value>(launch, params, some, stream); });
  };
  const int k_dim = launch.format.k.head_dim, v_dim = launch.format.v.head_dim;
  if (k && v && k_dim != v_dim) {
    const cudaError_t error = run(k_dim, {jobs.keys, 0});
    return error == cudaSuccess ? run(v_dim, {0, jobs.values}) : error;
  }
  return run(k ? k_dim : v_dim, jobs);
}

}  // namespace

bool chooses_centroids(int head_dim) { return head_dim == 64 || head_dim == 128; }

Status plan_centroids(WriteLaunch& launch, bool bf16) {
  if (launch.format.k.index_bytes == 0 && launch.format.v.index_bytes == 0) return {};
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = bf16 ? load_kernels<__nv_bfloat16>() : load_kernels<__half>();
  return cuda_status(error, "quantize_write: centroids: plan");
}

Status choose_centroids(const WriteLaunch& launch, WriteParams& params, bool bf16, CUstream_st* stream) {
  const auto is_chosen = [](const TileSide& tile, const WriteSide& side) {
    return tile.index_bytes > 0 && chooses_centroids(tile.head_dim) && !side.has_indices;
  };
  const bool k = is_chosen(launch.format.k, params.k), v = is_chosen(launch.format.v, params.v);
  if ((!k && !v) || params.num_tokens == 0) return {};
  const cudaError_t error = bf16 ? launch_nearest<__nv_bfloat16>(launch, params, k, v, stream)
                                 : launch_nearest<__half>(launch, params, k, v, stream);
  params.k.has_indices |= k, params.v.has_indices |= v;
  return cuda_status(error, "quantize_write: centroids: launch");
}

}  // namespace kvq
