#pragma once

#include <kvq/runtime/kernels/decode/loader.cuh>
#include <kvq/runtime/kernels/decode/merge.cuh>
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
/// One warp of a block loads: it walks the block's piece of the line (schedule.cuh) and fills a ring of stages, whose
/// owners, teams of warps, it serves in turn. A stage may also be a job: merge an item whose partial results are there.
namespace kvq::decode {

template <typename T>
__global__ void __launch_bounds__(T::kBlockThreads, T::kMinBlocks)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using Activation = typename T::Activation;
  using Record = typename T::Record;
  using Side = typename T::VSide;
  constexpr int kDim = T::kHeadDim;
  extern __shared__ __align__(128) unsigned char memory[];
  typename T::Shared& shared = *reinterpret_cast<typename T::Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;

  // 1. The line, and who does what.
  if (thread < T::kItems) ptx::mbarrier_init(ptx::shared_address(&shared.left[thread]), T::kWarps);
  if (thread < T::kStages) {
    ptx::mbarrier_init(ptx::shared_address(&shared.full[thread]), kFullArrivals);
    ptx::mbarrier_init(ptx::shared_address(&shared.empty[thread]), T::kTeam);
#if __CUDA_ARCH__ >= 900
    ptx::fence_mbarrier_init();
#endif
  }
  const int blocks = static_cast<int>(gridDim.x);
  survey<T>(p, shared, static_cast<int>(blockIdx.x), blocks);

  // Sequences without a visible token have no slots.
  for (int b = static_cast<int>(blockIdx.x); b < p.batch; b += blocks)
    if (p.seq_lens[b] <= 0) {
      for (int i = thread; i < p.num_q_heads * kDim; i += T::kBlockThreads)
        from_float(0.0f, static_cast<Activation*>(p.out)[b * p.out_stride + i]);
      if (p.lse)
        for (int i = thread; i < p.num_q_heads; i += T::kBlockThreads)
          p.lse[static_cast<std::int64_t>(b) * p.num_q_heads + i] = p.sink_logits ? p.sink_logits[i] : kMinusInf;
    }
  const Cut cut(shared.total, blocks);
  if (static_cast<int>(blockIdx.x) >= cut.pieces) return;
  if (warp == T::kWarps) {
    Loader<T>{p, shared, lane}.run(cut);
    return;
  }

  const int team = warp / T::kTeam, member = warp % T::kTeam;
  const int group_heads = p.num_q_heads / p.num_kv_heads;
  Query<T> query;
  State<T> state;
  int stage = team;
  unsigned parity = 0;
  for (;;) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
    const typename T::StageInfo info = shared.info[stage];
    if (info.flags & kStageEnd) return;
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
      stage += T::kTeams;
      if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
    };

    // 2. All partial results of an item are there: merge and finish it.
    if (info.flags & kStageMerge) {
      const typename T::Item item = shared.merges[info.flags >> kStageItemShift];
      const auto record_of = [&](int r) {
        return reinterpret_cast<const Record*>(p.partials) + 2 * static_cast<std::int64_t>(item.first_piece + r) +
               (r == 0);
      };
      merge_records<T>(
          shared, item.last_piece - item.first_piece + 1,
          [&](int r, int head) { return __ldcg(&record_of(r)->state[head]); },
          [&](int r, int quad) { return __ldcg(reinterpret_cast<const float4*>(record_of(r)->value) + quad); });
      finish<T>(p, shared, item);
      release();
      continue;
    }

    // 3. A new item's queries: rotated, as operands.
    if (info.flags & kStageFirst) {
      const int label = info.flags >> kStageItemShift;
      const Activation* q = reinterpret_cast<const Activation*>(shared.raw_q[label]);
      sync<T>();  // they came with the first stage, which the first team waited for
      for (int i = thread; i < T::kHeads * kDim; i += T::kThreads)
        shared.record.value[i / kDim][i % kDim] = i / kDim < group_heads ? to_float(q[i]) : 0.0f;
      sync<T>();
      rotate<T>(shared, p.rotation_k, shared.items[label].head, false);
      for (int i = thread; i < T::kTeam * T::kBlocks * 64; i += T::kThreads) {
        const int l = i % 32, half = i / 32 % 2, block = i / 64 % T::kBlocks, m = i / 64 / T::kBlocks;
        const float* row = shared.record.value[4 * m + (l >> 3)];
        const int channel = 16 * block + 8 * half + 2 * (l & 3), part = l >> 2 & 1;
        shared.exact_q[m][block][half][l] = half_of(row[channel], part) | half_of(row[channel + 1], part) << 16;
      }
      query.load(&shared.record.value[4 * member], p.softmax_scale, lane);
      state.reset();
      sync<T>();
    }

    // 4. A stage of tokens.
    if (!T::kExact && (info.flags & kStageCoded)) {
      if constexpr (!T::kExact)
        attend_coded<T>(shared.stages[stage], info.first, info.begin, info.end, query, state, lane);
    } else if (info.flags & kStageExact) {
      attend_exact<T>(shared.stages[stage], info.first, info.begin, info.end, shared.exact_q[member], query, state,
                      lane);
    }
    release();
    if (!(info.flags & kStageLast)) continue;

    // 5. The item's end, or the end of this block's part: merge the warps. Heads of member m are in the warps m, m +
    // kTeam, ...
    const typename T::Item item = shared.items[info.flags >> kStageItemShift];
    {
      const int g = lane >> 2, t = lane & 3;
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.sum += __shfl_xor_sync(kAll, state.sum, step);
#pragma unroll
        for (float& m : state.minima) m += __shfl_xor_sync(kAll, m, step);
      }
#pragma unroll
      for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float value = state.out[block][i];
          if constexpr (!T::kExact)
            value += (Side::kAffine ? 1.0f : -0.5f * Side::kLevels) *
                     state.minima[value_step(Side::side(), block) / Side::kStepsInGroup];
          shared.merged[warp][t][value_channel(Side::side(), 16 * block + 8 * i + g)] = value;
        }
      if (g == 0) shared.merged_state[warp][t] = make_float2(state.max * query.unit, state.sum);
    }
    sync<T>();
    Record& record = item.record >= 0 ? reinterpret_cast<Record*>(p.partials)[item.record] : shared.record;
    for (int i = thread; i < T::kHeads * kDim; i += T::kThreads) {
      const int head = i / kDim, channel = i % kDim;
      float max = kMinusInf, value = 0.0f, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < T::kTeams; ++w) max = fmaxf(max, shared.merged_state[w * T::kTeam + head / 4][head % 4].x);
#pragma unroll
      for (int w = 0; w < T::kTeams; ++w) {
        const float2 theirs = shared.merged_state[w * T::kTeam + head / 4][head % 4];
        const float factor = theirs.x == kMinusInf ? 0.0f : ptx::ex2(theirs.x - max);
        value = fmaf(factor, shared.merged[w * T::kTeam + head / 4][head % 4][channel], value);
        sum = fmaf(factor, theirs.y, sum);
      }
      record.value[head][channel] = value;
      if (channel == 0) record.state[head] = make_float2(max, sum);
    }
    if (item.record >= 0) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.left[info.flags >> kStageItemShift]));
    } else {
      sync<T>();
      finish<T>(p, shared, item);
    }
  }
}

}  // namespace kvq::decode
