#include <kvq/runtime/kernels/quantize_write/pairs.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/quantize_write/pair_store.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

namespace kvq {

namespace {

/// Calls f(std::integral_constant<int, memory>).
template <typename F>
auto with_memory(int memory, F f) {
  if (memory == 1) return f(std::integral_constant<int, 1>{});
  if (memory == 2) return f(std::integral_constant<int, 2>{});
  return f(std::integral_constant<int, 3>{});
}

}  // namespace

Status plan_pairs(int memory) {
  return with_memory(memory, [](auto known) {
    cudaError_t error = load_kernel(write::pair_search_kernel<known.value>);
    if (error == cudaSuccess) error = load_kernel(write::pair_store_kernel<known.value>);
    return cuda_status(error, "quantize_write: pairs: plan");
  });
}

Status run_pairs(const WriteParams& params, int jobs, CUstream_st* stream) {
  return with_memory(params.pairs.memory, [&](auto known) {
    const dim3 grid(static_cast<unsigned>(params.pairs.blocks_of_job), static_cast<unsigned>(jobs));
    cudaError_t error = launch_kernel(write::pair_search_kernel<known.value>, grid, 32, 0, false, stream, params);
    if (error == cudaSuccess)
      error = launch_kernel(write::pair_store_kernel<known.value>, grid, 32, 0, false, stream, params);
    return cuda_status(error, "quantize_write: pairs: launch");
  });
}

std::size_t write_workspace_bytes(const WriteVariant& variant, int num_kv_heads, int num_tokens) {
  const std::size_t blocks = (static_cast<std::size_t>(num_tokens) + PairBlock::kTokens - 1) / PairBlock::kTokens;
  // Sides with one memory are searched together, others one after the other.
  const auto of_side = [&](int memory) {
    return memory == 0
               ? std::size_t{0}
               : blocks * static_cast<std::size_t>(num_kv_heads) * static_cast<std::size_t>(PairBlock{memory}.bytes());
  };
  const int k = variant.k_rows.pair_memory, v = variant.v_rows.pair_memory;
  return k == v ? 2 * of_side(k) : std::max(of_side(k), of_side(v));
}

}  // namespace kvq
