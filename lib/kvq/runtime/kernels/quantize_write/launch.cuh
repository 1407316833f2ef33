#pragma once

#include <kvq/runtime/kernels/quantize_write/variant.h>
#include <kvq/runtime/kernels/quantize_write/kernel.cuh>

#include <cuda_runtime.h>

#include <type_traits>

namespace kvq {

template <typename K, typename V, typename T>
Status run_write(const WriteParams& params, CUstream_st* stream) {
  if (params.num_tokens == 0) return {};
  constexpr int kTokens = kTileTokens * write::kWarps;
  const dim3 grid(static_cast<unsigned>((params.num_tokens + kTokens - 1) / kTokens),
                  static_cast<unsigned>(2 * params.num_kv_heads));
  write::quantize_write_kernel<K, V, T><<<grid, 32 * write::kWarps, 0, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{}
                              : Status::fail(StatusCode::cuda, "quantize_write: launch: %s", cudaGetErrorString(error));
}

template <typename K, typename V, typename T>
WriteVariant write_variant(const char* name) {
  return {name, K::side(), V::side(), K::kBfloat, V::kBfloat, std::is_same_v<T, __nv_bfloat16>, run_write<K, V, T>};
}

}  // namespace kvq
