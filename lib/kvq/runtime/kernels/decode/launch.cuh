#pragma once

#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/decode/combine.cuh>
#include <kvq/runtime/kernels/decode/kernel.cuh>
#include <kvq/runtime/kernels/decode/queries.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace kvq {

template <typename T>
Status plan_decode(DecodeLaunch& launch) {
  launch.shared_bytes = static_cast<int>(sizeof(typename T::DecodeShared));
  launch.operand_bytes = static_cast<int>(sizeof(typename T::Operand));
  launch.partial_bytes = static_cast<int>(sizeof(typename T::Partial));
  using QueriesShared = decode::QueriesShared<T::kHeadDim>;
  using CombineShared = decode::CombineShared<T>;
  static_assert(std::max({sizeof(typename T::DecodeShared), sizeof(QueriesShared), sizeof(CombineShared)}) <= 99 * 1024,
                "what a block has on every architecture");
  int device = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&launch.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  // A multiprocessor changes its split between L1 and shared memory only while it is idle, so all kernels of a call
  // prefer the same carveout.
  const auto prepare = [&](auto kernel, std::size_t bytes) {
    if (error == cudaSuccess) error = load_kernel(kernel, launch.overlapping);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error == cudaSuccess)
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  };
  prepare(decode::queries_kernel<T>, sizeof(QueriesShared));
  prepare(decode::decode_kernel<T>, sizeof(typename T::DecodeShared));
  prepare(decode::combine_kernel<T>, sizeof(CombineShared));
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, decode::decode_kernel<T>, T::kBlockThreads,
                                                          sizeof(typename T::DecodeShared));
  launch.blocks = each * launch.multiprocessors;
  if (error == cudaSuccess && decode::CompletionCounter::kMost < decode::Splits::kRounds * launch.blocks)
    return Status::fail(StatusCode::unsupported, "decode: plan: %d blocks at once; supported are %d", launch.blocks,
                        decode::CompletionCounter::kMost / decode::Splits::kRounds);
  launch.shared_partials = 2 * decode::Splits::kRounds * launch.blocks;
  return cuda_status(error, "decode: plan");
}

template <typename T>
Status run_decode(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) {
  if (params.batch == 0) return {};
  const int work_tiles = params.batch * params.num_kv_heads, group_heads = params.num_q_heads / params.num_kv_heads;
  DecodeParams p = params;
  std::byte* at = static_cast<std::byte*>(p.workspace);
  p.work_counter = reinterpret_cast<std::int32_t*>(at), at += kWorkCounterBytes;
  p.completions = reinterpret_cast<unsigned long long*>(at);
  at += (sizeof *p.completions * static_cast<std::size_t>(work_tiles) + 255) / 256 * 256;
  p.partials = at;
  at += (static_cast<std::size_t>(launch.shared_partials) + static_cast<std::size_t>(work_tiles)) *
        static_cast<std::size_t>(launch.partial_bytes);
  p.operands = at;

  // Blocks of the queries and combine kernels: a multiple of the KV heads, so that a block needs one rotation. Blocks
  // of the queries kernel take registers that decode blocks wait for, hence one for each multiprocessor; blocks of the
  // combine kernel start only as decode blocks end, hence two.
  const auto rotate_blocks = [&](int units, int each) {
    const int fill = each * launch.multiprocessors;
    return units <= fill ? units : std::max(1, fill / params.num_kv_heads) * params.num_kv_heads;
  };
  // Units of the combine kernel. Few work tiles: one query head each. Many: as many sequences as one product
  // rotates.
  using CombineShared = decode::CombineShared<T>;
  const bool many = work_tiles >= launch.multiprocessors;
  const int fill = 2 * launch.multiprocessors;
  decode::CombineSchedule units = {1, many ? T::kHeads : 1};
  while (2 * units.unit_sequences * T::kHeads <= CombineShared::kRows && work_tiles / units.unit_sequences > fill)
    units.unit_sequences *= 2;
  units.tile_units = (group_heads + units.unit_heads - 1) / units.unit_heads;
  // A round has one split for each block, so at most this many work tiles have more than kPartialsAtOnce partial
  // results in the last round. (A few more may have many in the round before, but these are complete early enough.)
  const int long_tiles = many ? launch.blocks / CombineShared::kPartialsAtOnce : 0;
  const int last_sequences = (long_tiles + params.num_kv_heads - 1) / params.num_kv_heads;
  units.tail_begin = std::max(0, params.batch - last_sequences) / units.unit_sequences * units.unit_sequences;
  units.tail_sequences = params.batch - units.tail_begin;
  units.tail_units = (group_heads + CombineShared::kTailHeads - 1) / CombineShared::kTailHeads;
  units.units_before_tail = units.tail_begin / units.unit_sequences * units.tile_units;
  const auto rotate_bytes = [](std::size_t all, const DeviceRotation& rotation) {
    return static_cast<int>(rotation.matrix ? all : all - sizeof(typename decode::DenseRotation<T::kHeadDim>::Held));
  };
  // For a queue of one round a few blocks stay idle: (a) as many as start late, because they wait for a block of the
  // queries kernel to end, and (b) so many that splits end where work tiles of equal length end, because a block
  // with two work tiles has two beginnings and two ends.
  const int query_blocks = rotate_blocks(work_tiles, 1), late = launch.overlapping ? query_blocks : 0;
  p.one_round_splits = launch.blocks;
  for (const int blocks : {launch.blocks, launch.blocks - late}) {
    const int whole = blocks - blocks % work_tiles;
    if (launch.blocks - whole <= launch.blocks / 16) p.one_round_splits = whole;
  }
  cudaError_t error = launch_kernel(decode::queries_kernel<T>, query_blocks, decode::kRotateThreads,
                                    rotate_bytes(sizeof(decode::QueriesShared<T::kHeadDim>), p.rotation_k),
                                    launch.overlapping, stream, p);
  if (error == cudaSuccess)
    error = launch_kernel(decode::decode_kernel<T>, launch.blocks, T::kBlockThreads, launch.shared_bytes,
                          launch.overlapping, stream, p);
  if (error == cudaSuccess)
    error = launch_kernel(decode::combine_kernel<T>, rotate_blocks(units.count() * params.num_kv_heads, 2),
                          decode::kRotateThreads, rotate_bytes(sizeof(decode::CombineShared<T>), p.rotation_v),
                          launch.overlapping, stream, p, launch.blocks, units);
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
          run_decode<T>};
}

}  // namespace kvq
