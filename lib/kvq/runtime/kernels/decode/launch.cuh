#pragma once

#include <kvq/runtime/kernels/decode/combine.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/decode/kernel.cuh>
#include <kvq/runtime/kernels/decode/prepare.cuh>
#include <kvq/runtime/kernels/decode/queries.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace kvq {

/// The traits that the decode kernel is compiled with: that of four rows does not depend on the type of queries and
/// results, so one serves both.
template <typename T>
using DecodeKernelTraits =
    std::conditional_t<T::kManyRows, T, DecodeTraits<typename T::KSide, typename T::VSide, T::kHeads, __nv_bfloat16>>;

template <typename T>
using DecodeCombineOf = DecodeCombine<T::kHeadDim, T::kHeads, typename T::Activation>;

template <typename T>
constexpr DecodeKernelShape decode_kernel_shape() {
  using Combine = DecodeCombineOf<T>;
  return {
      .policy = T::kPolicy,
      .heads = T::kHeads,
      .consumer_warps = T::kConsumerWarps,
      .stages = T::kStages,
      .stage_bytes = T::kStageBytes,
      .chunk = {T::kStageTokens, T::kExactTokens},
      .query_buffers = T::kQueryBuffers,
      .shared_bytes = static_cast<int>(sizeof(typename T::DecodeShared)),
      .operand_bytes = static_cast<int>(sizeof(typename T::Operand)),
      .partial_bytes = static_cast<int>(sizeof(typename T::Partial)),
      .combine_rows = Combine::kRows,
      .tail_rows = Combine::kTailRows,
      .partials_at_once = Combine::kPartialsAtOnce,
  };
}

template <typename T>
Status plan_decode(DecodeLaunch& launch) {
  const DecodeKernelShape shape = decode_kernel_shape<T>();
  launch.shared_bytes = shape.shared_bytes, launch.operand_bytes = shape.operand_bytes;
  launch.partial_bytes = shape.partial_bytes;
  using QueriesShared = decode::QueriesShared<T>;
  static_assert(std::max(sizeof(typename T::DecodeShared), sizeof(QueriesShared)) <= kMostDecodeShared);
  static_assert(T::kPolicy.multiprocessor_blocks * (sizeof(typename T::DecodeShared) + 1024) <= 228 * 1024,
                "shared memory of a Hopper multiprocessor, which takes 1 KB of it for each block");
  int device = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto decode_kernel = decode::decode_kernel<DecodeKernelTraits<T>>;
  if (error == cudaSuccess)
    error = prepare_decode_kernel(decode::queries_kernel<T>, sizeof(QueriesShared), launch.overlapping);
  if (error == cudaSuccess)
    error = prepare_decode_kernel(decode_kernel, sizeof(typename T::DecodeShared), launch.overlapping);
  if (error == cudaSuccess) error = DecodeCombineOf<T>::prepare(launch.overlapping);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, decode_kernel, T::kBlockThreads,
                                                          sizeof(typename T::DecodeShared));
  launch.blocks = each * launch.multiprocessors;
  static_assert(decode::Splits::kRounds * decode::Splits::kMostBlocks <= decode::CompletionCounter::kMost);
  if (error == cudaSuccess && launch.blocks > decode::Splits::kMostBlocks)
    return Status::fail(StatusCode::unsupported, "decode: plan: %d blocks at once; supported are %d", launch.blocks,
                        decode::Splits::kMostBlocks);
  launch.cut_partials = static_cast<int>(decode::cut_partials(launch.blocks));
  return cuda_status(error, "decode: plan");
}

template <typename T>
Status run_decode(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) {
  if (params.cache.batch == 0 || params.tokens() == 0) return {};
  DecodeKernelParams p = {params};
  p.heads_per_kv_head = params.num_q_heads / params.cache.num_kv_heads;
  p.passes = make_decode_passes(T::kHeads, p.heads_per_kv_head, params.max_new_tokens);
  const DecodeGrids grids = make_decode_grids(decode_kernel_shape<T>(), device_of(launch), p.num_passes(),
                                              p.passes.tokens * p.passes.heads, params.cache.num_kv_heads);
  const DecodeWorkspace workspace = decode_workspace(
      launch, static_cast<std::size_t>(p.num_passes()) * static_cast<std::size_t>(params.cache.num_kv_heads));
  std::byte* at = static_cast<std::byte*>(params.workspace);
  p.work_counter = reinterpret_cast<std::int32_t*>(at + workspace.work_counter);
  p.completions = reinterpret_cast<unsigned long long*>(at + workspace.completions);
  p.partials = at + workspace.partials;
  p.operands = at + workspace.operands;
  p.one_round_splits = grids.one_round_splits;
  cudaError_t error =
      launch_kernel(decode::queries_kernel<T>, grids.query_blocks, decode::kRotateThreads,
                    rotate_shared_bytes<decode::QueriesShared<T>>(p.cache.rotation_k), launch.overlapping, stream, p);
  if (error == cudaSuccess)
    error = launch_kernel(decode::decode_kernel<DecodeKernelTraits<T>>, grids.decode_blocks, T::kBlockThreads,
                          launch.shared_bytes, launch.overlapping, stream, p);
  if (error == cudaSuccess)
    error = DecodeCombineOf<T>::launch(p, grids.combine_blocks, grids.decode_blocks, grids.combine, launch.overlapping,
                                       stream);
  return cuda_status(error, "decode: launch");
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
          run_decode<T>,
          true,
          decode_kernel_shape<T>()};
}

}  // namespace kvq
