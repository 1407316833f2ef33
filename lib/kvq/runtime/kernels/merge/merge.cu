#include <kvq/runtime/kernels/merge/params.h>
#include <kvq/device/convert.cuh>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>

#include <cuda_runtime.h>

#include <cstdint>

namespace kvq {

namespace merge {

constexpr int kThreads = 256, kChannels = 8;

/// A thread has eight channels of a row. Grid: the threads of all rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams p) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t rows = std::int64_t{p.num_tokens} * p.num_heads, row = index / (p.head_dim / kChannels);
  if (row >= rows) return;
  const int chunk = static_cast<int>(index % (p.head_dim / kChannels));
  const std::int64_t token = row / p.num_heads, element = row % p.num_heads * p.head_dim + chunk * kChannels;

  float largest = kMinusInf;
  for (int s = 0; s < p.num_states; ++s) largest = fmaxf(largest, p.state_lse[s * rows + row]);
  float sum = 0.0f, values[kChannels] = {};
  for (int s = 0; s < p.num_states; ++s) {
    const float lse = p.state_lse[s * rows + row];
    if (lse == kMinusInf) continue;  // the result counts for nothing, whatever it holds
    const float weight = expf(lse - largest);
    sum += weight;
    const uint4 eight = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.states) + s * p.state_stride +
                                                        token * p.token_stride + element);
    const T* numbers = reinterpret_cast<const T*>(&eight);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) values[i] = fmaf(weight, to_float(numbers[i]), values[i]);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  uint4 eight;
  T* numbers = reinterpret_cast<T*>(&eight);
#pragma unroll
  for (int i = 0; i < kChannels; ++i) from_float(values[i] * inverse, numbers[i]);
  *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + token * p.out_stride + element) = eight;
  if (p.lse && chunk == 0) p.lse[row] = sum == 0.0f ? kMinusInf : largest + logf(sum);
}

}  // namespace merge

Status load_merge() {
  const cudaError_t error = load_kernel(merge::merge_kernel<__nv_bfloat16>);
  return cuda_status(error == cudaSuccess ? load_kernel(merge::merge_kernel<__half>) : error, "merge: load");
}

Status run_merge(const MergeParams& p, CUstream_st* stream) {
  const std::int64_t threads = std::int64_t{p.num_tokens} * p.num_heads * (p.head_dim / merge::kChannels);
  if (threads == 0) return {};
  const dim3 grid(static_cast<unsigned>((threads + merge::kThreads - 1) / merge::kThreads));
  const auto kernel = p.bf16 ? merge::merge_kernel<__nv_bfloat16> : merge::merge_kernel<__half>;
  return cuda_status(launch_kernel(kernel, grid, merge::kThreads, 0, false, stream, p), "merge: launch");
}

}  // namespace kvq
