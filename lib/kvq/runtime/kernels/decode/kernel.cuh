#pragma once

#include <kvq/runtime/kernels/decode/producer.cuh>
#include <kvq/runtime/kernels/decode/share.cuh>
#include <kvq/runtime/kernels/decode/stages.cuh>

/// Decode attention over paged low-bit keys and values, straight from tiles that are laid out as tensor-core fragments
/// (formats/pages.md). Integer tensor cores multiply codes that were only masked; the float side is folded away:
///
///   key row t, group j:   k_hat = s c + m       q . k_hat = sum_j s (q_j . c_j) + m sum(q_j)
///   value row t, group j: v_hat = s c + m       out = sum_t (p_t s) c + p_t m
///
/// q is cut into a 16-bit integer per row, q_int = 256 hi + lo, and hi and lo of four query heads are the eight columns
/// of the product; so are the two halves of the weights p s, as 16-bit integers of the stage's largest. Both integer
/// products are exact.
///
///   warp lane 4 g + t      keys: tokens g, g + 8 of a tile x head t      values: rows g, g + 8 of a block x head t
///
/// The kernel is warp-specialized. The producer warp (Producer) walks the block's splits of the work queue
/// (schedule.cuh) and fills a ring of stages, for the consumer groups in turn. A consumer group waits for the barriers
/// of its stage and of its queries. At the end of a work tile the last consumer warp adds up the shares of all groups
/// and stores the partial result (share.cuh); the producer warp then signals the combine kernel.
namespace kvq::decode {

template <typename T>
__global__ void __maxnreg__(T::kRegisters) decode_kernel(const __grid_constant__ DecodeKernelParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  typename T::DecodeShared& shared = *reinterpret_cast<typename T::DecodeShared*>(memory);
  // The shuffle tells the compiler that a warp's lanes agree.
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = __shfl_sync(kAll, thread >> 5, 0);

  // 1. Barriers, the work queue, and the role of each warp.
  if (lane == 0) {  // one lane of each warp, because the lanes of one warp would initialize barriers one at a time
#pragma unroll 1
    for (int i = warp; i < T::kQueryBuffers; i += T::kWarps + 1) {
      ptx::mbarrier_init(ptx::shared_address(&shared.queries_full[i]), async_copy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.partials_stored[i]),
                         32 * (T::kConsumerGroups == 1 ? T::kWarps : 1));
      ptx::mbarrier_init(ptx::shared_address(&shared.shares_reduced[i]), T::kThreads);
      shared.shares_stored[i] = 0;
    }
#pragma unroll 1
    for (int i = warp; i < T::kStages; i += T::kWarps + 1) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), async_copy::kArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), 32 * T::kGroupWarps);
    }
  }
  ptx::fence_mbarrier_init();
  count_chunks<T>(p, shared.queue);
  const Splits splits(ptx::mul_wide(static_cast<unsigned>(shared.queue.chunks_before[T::kThreads]),
                                    static_cast<unsigned>(p.cache.num_kv_heads)),
                      static_cast<int>(gridDim.x), p.one_round_splits, [] { __trap(); });
  if (static_cast<int>(blockIdx.x) >= splits.per_round) {
    ptx::griddepcontrol_wait();  // kernels that wait for this grid rely on the grid before it having ended, too
    return;
  }
  if (warp == T::kWarps) {
    Producer<T>{p, shared, lane}.run(splits);
    return;
  }

  const int consumer_group = warp / T::kGroupWarps, group_warp = warp % T::kGroupWarps;
  Query<T> query;
  State<T> state;
  int stage = consumer_group, next_buffer = 0;  // a buffer: one of the buffers for the queries of a work tile
  unsigned parity = 0, queries_parity = 0,
           buffer_parity = 0;  // barrier phases: the ring, the next buffer, this work tile's buffer
  for (;;) {
    // An mbarrier carries one phase bit, and copies complete in any order. If the stage was last used by another
    // consumer group, this consumer group could be one phase ahead, so it first waits until that consumer group has
    // released the stage.
    if (!T::kOwned) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity ^ 1);
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
    const typename T::StageInfo info = shared.info[stage];
    if (info.flags & kStageEnd) return;
    const int buffer = info.flags >> kStageBufferShift;

    // 2. A new work tile: its queries.
    if (info.flags & kStageFirst) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.queries_full[buffer]), queries_parity);
      buffer_parity = queries_parity;
      if (++next_buffer == T::kQueryBuffers) next_buffer = 0, queries_parity ^= 1;
      query.load(shared.operands[buffer], group_warp, lane);
      state.reset();
    }

    // 3. A KV chunk.
    if (!T::kExact && (info.flags & kStageCoded)) {
      if constexpr (!T::kExact)
        attend_coded<T>(shared.stages[stage], info.first, info.begin, info.end, query, state, lane);
    } else if (info.flags & kStageExact) {
      attend_exact<T>(shared.stages[stage], info.first, info.begin, info.end,
                      shared.operands[buffer].halves[group_warp], query, state, lane);
    }

    // 4. The end of the work tile, or of the split.
    if (info.flags & kStageLast) {
      finish_share<T>(state);
      if constexpr (T::kConsumerGroups == 1)
        store_partial<T>(p, shared, buffer, stage, group_warp, lane, state);
      else
        store_share<T>(p, shared, buffer, stage, consumer_group, group_warp, lane, state, buffer_parity);
    } else {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
    }
    stage += T::kConsumerGroups;
    if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
  }
}

}  // namespace kvq::decode
