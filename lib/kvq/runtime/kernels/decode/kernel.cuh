#pragma once

#include <kvq/runtime/kernels/decode/four_rows.cuh>
#include <kvq/runtime/kernels/decode/many_rows.cuh>
#include <kvq/runtime/kernels/decode/producer.cuh>
#include <kvq/runtime/kernels/decode/share.cuh>

#include <type_traits>

/// Decode attention over paged low-bit keys and values, straight from tiles that are laid out as tensor-core fragments
/// (formats/pages.md). Tensor cores multiply codes that were only masked; the float side is folded away:
///
///   key of token i, group j:    k_hat = s c + m       q . k_hat = sum_j s (q_j . c_j) + m sum(q_j)
///   value of token i, group j:  v_hat = s c + m       out = sum_i (p_i s) c + p_i m
///
/// Symmetric groups store no minimum: m = -s (2^bits - 1) / 2, so the terms of m become a correction of the products
/// by half the largest code (Operand::sums, finish()).
///
/// Queries are cut into integers, so products with keys are integer ones. Weights are cut into integers, too, if a work
/// tile has up to four rows or the cache has bit tiles (four_rows.cuh); else they are fp16 numbers (many_rows.cuh).
///
/// A call is three kernels, each of which may start before the previous one has ended: queries (queries.cuh), decode,
/// and combine (combine.cuh). This one is warp-specialized. The producer warp (Producer) walks the block's splits of
/// the chunk queue (schedule.cuh) and fills a ring of stages, for the consumer warps in turn. A consumer warp waits for
/// the barriers of its stage and of its queries, and attends with all rows. At the end of a work tile the consumer
/// warps add up their shares and store the partial result (share.cuh). The producer warp later signals the combine
/// kernel (Producer::signal_partial()).
///
/// Results are bitwise reproducible on one device: lengths and grids alone decide where splits begin and which consumer
/// warp has which KV chunk, and shares and partial results are merged in a fixed order. Only which block claims a
/// split varies.
namespace kvq::decode {

/// What a consumer warp does with its stages.
template <typename T>
using AttentionOf = std::conditional_t<T::kManyRows, ManyRows<T>, FourRows<T>>;

/// Completes all work tiles as faulty, because the queue is too long.
__device__ __noinline__ inline void refuse_all(unsigned long long* completions, int work_tiles) {
  for (int i = static_cast<int>(threadIdx.x); i < work_tiles; i += static_cast<int>(blockDim.x))
    atomicExch(completions + i, CompletionCounter::kFaulty);
}

template <typename T>
__global__ void __maxnreg__(T::kRegisters) decode_kernel(const __grid_constant__ DecodeKernelParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  typename T::DecodeShared& shared = *reinterpret_cast<typename T::DecodeShared*>(memory);
  // The shuffle tells the compiler that a warp's lanes agree.
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = __shfl_sync(kAll, thread >> 5, 0);

  if (warp == 1) ptx::fetch_params(p);
  // A single pass needs no prefix sum. Its sequence is loaded first, because all else waits for it.
  const bool single = p.num_passes() == 1;
  SequenceEntry entry;
  if (single) entry = load_entry(p.cache, 0);

  // 1. Barriers, the chunk queue, and the role of each warp.
  if (lane == 0) {  // one lane of each warp, because the lanes of one warp would initialize barriers one at a time
#pragma unroll 1
    for (int i = warp; i < T::kQueryBuffers; i += T::kConsumerWarps + 1) {
      ptx::mbarrier_init(ptx::shared_address(&shared.queries_full[i]), async_copy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.partials_stored[i]), T::kConsumerThreads);
    }
#pragma unroll 1
    for (int i = warp; i < T::kStages; i += T::kConsumerWarps + 1) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), async_copy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), T::kConsumerThreads);
    }
  }
  ptx::fence_mbarrier_init();
  TileChunks single_pass = {};
  std::uint64_t chunks = 0;
  if (single) {
    single_pass = chunks_of<T>(p, 0, check_pass(p, 0, entry).checked.tokens);
    chunks = ptx::mul_wide(static_cast<unsigned>(single_pass.count), static_cast<unsigned>(p.cache.num_kv_heads));
    __syncthreads();  // publishes the barriers
  } else {
    count_chunks<T>(p, shared.queue);  // ends with __syncthreads()
    chunks = shared.queue.total(p);
  }
  const Splits splits(chunks, static_cast<int>(gridDim.x), p.one_round_splits);
  if (static_cast<int>(blockIdx.x) >= splits.per_round) {
    // A later grid that waits for this one assumes that the queries kernel has ended as well, so this block must not
    // end before the queries kernel has.
    ptx::griddepcontrol_wait();
    if (chunks >> 32 && blockIdx.x == 0) {
      record_fault(p.cache.faults, {FaultCode::length, static_cast<std::int64_t>(chunks)}, -1, p.cache.layer);
      refuse_all(p.completions, p.num_passes() * p.cache.num_kv_heads);
    }
    return;
  }
  if (warp == T::kConsumerWarps) {
    Producer<T>{p, shared, lane}.run(splits, single_pass);
    return;
  }

  AttentionOf<T> attention;
  if constexpr (T::kValueCentroids) attention.masses.open(shared.masses[warp], lane);
  int stage = warp, next_buffer = 0;     // query buffer of the next work tile
  unsigned parity = 0, next_parity = 0;  // phases of barriers: of the ring, of next_buffer
  unsigned odd = 0;                      // work tiles before this one, modulo 2
  for (;;) {
    // An mbarrier carries one phase bit, and copies complete in any order. If the stage was last used by another
    // consumer warp, the copy for that warp may not be complete yet. Then a wait for this pass over the ring would find
    // the phase of two passes ago, which has the same bit, and fall through. So this consumer warp first waits until
    // that consumer warp has released the stage.
    if (!T::kOwned) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity ^ 1);
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
    const typename T::StageInfo info = shared.info[stage];
    if (info.flags & kStageEnd) return;
    const int buffer = info.flags >> kStageBufferShift;

    // 2. A new work tile: its queries.
    if (info.flags & kStageFirst) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.queries_full[buffer]), next_parity);
      if (++next_buffer == T::kQueryBuffers) next_buffer = 0, next_parity ^= 1;
      attention.begin(shared.operands[buffer], lane);
      if constexpr (T::kBitTiles)
        for (int four = 0; four < T::kFours; ++four) exact_of<T>(shared, warp, lane).of(four).reset();
    }

    // 3. A KV chunk, or none: an empty stage has flags only.
    if (!T::kExact && (info.flags & kStageCoded)) {
      if constexpr (!T::kExact) attention.attend_coded(p, shared.stages[stage], info, shared.operands[buffer], lane);
    } else if (info.flags & kStageExact) {
      if constexpr (T::kBitTiles)
        attention.attend_exact(p, shared.stages[stage], info, shared.operands[buffer], exact_of<T>(shared, warp, lane),
                               lane);
      else if constexpr (T::kManyRows)
        attention.attend_exact(p, shared.stages[stage], info, shared.operands[buffer], lane);
      else
        attention.attend_exact(p, shared.stages[stage], info, shared.operands[buffer], {}, lane);
    } else if (info.flags & kStageFaulty) {
      attention.poison();
    }

    // 4. The end of the work tile, or of the split.
    if (info.flags & kStageLast) {
      attention.finish();
      store_share<T>(p, shared, buffer, stage, warp, lane, attention, odd, info.flags);
      odd ^= 1;
    } else {
      // The threads of all consumer warps arrive at the last stage of each, so here those of one warp arrive as often.
      ptx::mbarrier_arrive_times<T::kConsumerWarps>(ptx::shared_address(&shared.empty[stage]));
    }
    stage += T::kConsumerWarps;
    if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
  }
}

}  // namespace kvq::decode
