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
  launch.shared_bytes = static_cast<int>(sizeof(typename T::Shared));
  launch.operand_bytes = static_cast<int>(sizeof(typename T::Operand));
  launch.record_bytes = static_cast<int>(sizeof(typename T::Record));
  using QueriesShared = decode::QueriesShared<T::kHeadDim>;
  using CombineShared = decode::CombineShared<T>;
  static_assert(std::max({sizeof(typename T::Shared), sizeof(QueriesShared), sizeof(CombineShared)}) <= 99 * 1024,
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
  prepare(decode::decode_kernel<T>, sizeof(typename T::Shared));
  prepare(decode::combine_kernel<T>, sizeof(CombineShared));
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, decode::decode_kernel<T>, T::kBlockThreads,
                                                          sizeof(typename T::Shared));
  launch.blocks = each * launch.multiprocessors;
  if (error == cudaSuccess && decode::Arrivals::kMost < decode::Cut::kRounds * launch.blocks)
    return Status::fail(StatusCode::unsupported, "decode: plan: %d blocks at once; supported are %d", launch.blocks,
                        decode::Arrivals::kMost / decode::Cut::kRounds);
  launch.shared_records = 2 * decode::Cut::kRounds * launch.blocks;
  return cuda_status(error, "decode: plan");
}

template <typename T>
Status run_decode(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) {
  if (params.batch == 0) return {};
  const int items = params.batch * params.num_kv_heads, group_heads = params.num_q_heads / params.num_kv_heads;
  DecodeParams p = params;
  std::byte* at = static_cast<std::byte*>(p.workspace);
  p.claims = reinterpret_cast<std::int32_t*>(at), at += kDecodeClaimBytes;
  p.arrivals = reinterpret_cast<unsigned long long*>(at);
  at += (sizeof *p.arrivals * static_cast<std::size_t>(items) + 255) / 256 * 256;
  p.partials = at;
  at += (static_cast<std::size_t>(launch.shared_records) + static_cast<std::size_t>(items)) *
        static_cast<std::size_t>(launch.record_bytes);
  p.operands = at;

  // Blocks of the queries and combine kernels: a multiple of the KV heads, so that a block needs one rotation. Blocks
  // of the queries kernel take registers that decode blocks wait for, hence one for each multiprocessor; blocks of the
  // combine kernel start only as decode blocks end, hence two.
  const auto side_blocks = [&](int units, int each) {
    const int fill = each * launch.multiprocessors;
    return units <= fill ? units : std::max(1, fill / params.num_kv_heads) * params.num_kv_heads;
  };
  // Units of the combine kernel. Few items: one query head each. Many: as many sequences as one product rotates.
  using CombineShared = decode::CombineShared<T>;
  const bool many = items >= launch.multiprocessors;
  const int fill = 2 * launch.multiprocessors;
  decode::Units units = {1, many ? T::kHeads : 1};
  while (2 * units.sequences_each * T::kHeads <= CombineShared::kRows && items / units.sequences_each > fill)
    units.sequences_each *= 2;
  units.splits = (group_heads + units.heads_each - 1) / units.heads_each;
  // A round has one piece (split) for each block, so at most this many items have more than kAtOnce parts in the last
  // round. (A few more may have many parts in the round before, but these are complete early enough.)
  const int long_items = many ? launch.blocks / CombineShared::kAtOnce : 0;
  const int last_sequences = (long_items + params.num_kv_heads - 1) / params.num_kv_heads;
  units.end = std::max(0, params.batch - last_sequences) / units.sequences_each * units.sequences_each;
  units.end_sequences = params.batch - units.end;
  units.end_splits = (group_heads + CombineShared::kEndHeads - 1) / CombineShared::kEndHeads;
  units.before_end = units.end / units.sequences_each * units.splits;
  const auto side_bytes = [](std::size_t all, const DeviceRotation& rotation) {
    return static_cast<int>(rotation.matrix ? all : all - sizeof(typename decode::DenseRotation<T::kHeadDim>::Held));
  };
  // On a line of one round a few blocks stay idle: (a) as many as start late, because they wait for a block of the
  // queries kernel to end, and (b) so many that pieces end where items of equal length end, because a block with parts
  // of two items has two beginnings and two ends.
  const int query_blocks = side_blocks(items, 1), late = launch.overlapping ? query_blocks : 0;
  p.short_blocks = launch.blocks;
  for (const int blocks : {launch.blocks, launch.blocks - late}) {
    const int whole = blocks - blocks % items;
    if (launch.blocks - whole <= launch.blocks / 16) p.short_blocks = whole;
  }
  cudaError_t error = launch_kernel(decode::queries_kernel<T>, query_blocks, decode::kSideThreads,
                                    side_bytes(sizeof(decode::QueriesShared<T::kHeadDim>), p.rotation_k),
                                    launch.overlapping, stream, p);
  if (error == cudaSuccess)
    error = launch_kernel(decode::decode_kernel<T>, launch.blocks, T::kBlockThreads, launch.shared_bytes,
                          launch.overlapping, stream, p);
  if (error == cudaSuccess)
    error = launch_kernel(decode::combine_kernel<T>, side_blocks(units.count() * params.num_kv_heads, 2),
                          decode::kSideThreads, side_bytes(sizeof(decode::CombineShared<T>), p.rotation_v),
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
