#pragma once

#include <kvq/runtime/kernels/decode/loader.cuh>
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
/// The kernel is warp-specialized. The producer warp (Loader) walks the block's splits of the work queue (schedule.cuh)
/// and fills a ring of stages, for the consumer groups (`team`) in turn. A consumer group waits for the barriers of its
/// stage and of its queries. At the end of a work tile (`item`) the last consumer warp adds up the shares of all groups
/// and stores the partial result (share.cuh); the producer warp then signals the combine kernel.
namespace kvq::decode {

template <typename T>
__global__ void __maxnreg__(T::kRegisters) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  typename T::Shared& shared = *reinterpret_cast<typename T::Shared*>(memory);
  // The shuffle tells the compiler that a warp's lanes agree.
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = __shfl_sync(kAll, thread >> 5, 0);

  // 1. Barriers, the work queue, and the role of each warp.
  if (lane == 0) {  // one lane of each warp, because the lanes of one warp would initialize barriers one at a time
#pragma unroll 1
    for (int i = warp; i < T::kItems; i += T::kWarps + 1) {
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.left[i]), 32 * (T::kTeams == 1 ? T::kWarps : 1));
      ptx::mbarrier_init(ptx::shared_address(&shared.settled[i]), T::kThreads);
      shared.shares[i] = 0;
    }
#pragma unroll 1
    for (int i = warp; i < T::kStages; i += T::kWarps + 1) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), 32 * T::kTeam);
    }
  }
#if __CUDA_ARCH__ >= 900
  ptx::fence_mbarrier_init();
#endif
  survey<T>(p, shared.line);
  const Cut cut(
      ptx::mul_wide(static_cast<unsigned>(shared.line.runs_before[T::kThreads]), static_cast<unsigned>(p.num_kv_heads)),
      static_cast<int>(gridDim.x), p.short_blocks);
  if (static_cast<int>(blockIdx.x) >= cut.each) {
    ptx::griddepcontrol_wait();  // kernels that wait for this grid rely on the grid before it having ended, too
    return;
  }
  if (warp == T::kWarps) {
    Loader<T>{p, shared, lane}.run(cut);
    return;
  }

  const int team = warp / T::kTeam, member = warp % T::kTeam;
  Query<T> query;
  State<T> state;
  int stage = team, next_place = 0;  // a place: one of the buffers for the queries of a work tile
  unsigned parity = 0, ready_parity = 0,
           item_parity = 0;  // barrier phases: the ring, the next place, this item's place
  for (;;) {
    // An mbarrier carries one phase bit, and copies complete in any order. If the stage was last used by another team,
    // this team could be one phase ahead, so it first waits until that team has released the stage.
    if (!T::kOwned) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity ^ 1);
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
    const typename T::StageInfo info = shared.info[stage];
    if (info.flags & kStageEnd) return;
    const int place = info.flags >> kStageItemShift;

    // 2. A new work tile: its queries.
    if (info.flags & kStageFirst) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.ready[place]), ready_parity);
      item_parity = ready_parity;
      if (++next_place == T::kItems) next_place = 0, ready_parity ^= 1;
      query.load(shared.operands[place], member, lane);
      state.reset();
    }

    // 3. A KV chunk.
    if (!T::kExact && (info.flags & kStageCoded)) {
      if constexpr (!T::kExact)
        attend_coded<T>(shared.stages[stage], info.first, info.begin, info.end, query, state, lane);
    } else if (info.flags & kStageExact) {
      attend_exact<T>(shared.stages[stage], info.first, info.begin, info.end, shared.operands[place].halves[member],
                      query, state, lane);
    }

    // 4. The end of the work tile, or of the split.
    if (info.flags & kStageLast) {
      settle<T>(state);
      if constexpr (T::kTeams == 1)
        leave_alone<T>(p, shared, place, stage, member, lane, state);
      else
        leave_share<T>(p, shared, place, stage, team, member, lane, state, item_parity);
    } else {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
    }
    stage += T::kTeams;
    if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
  }
}

}  // namespace kvq::decode
