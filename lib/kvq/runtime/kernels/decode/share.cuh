#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/stages.cuh>

/// The end of an item (work tile) in a block. A share is the sum of one team (consumer group) over its stages. Each
/// team stores its share in the stage that it read last; the last warp to do so merges all shares and stores them in
/// global memory as one partial result.
namespace kvq::decode {

/// Sums over lanes, and adds the term that the integer products left out: of the minima (affine), or of the middle of
/// the codes (symmetric).
template <typename T>
__device__ __forceinline__ void settle(State<T>& state) {
  using Side = typename T::VSide;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    state.sum += __shfl_xor_sync(kAll, state.sum, step);
#pragma unroll
    for (float& m : state.minima) m += __shfl_xor_sync(kAll, m, step);
  }
  if constexpr (!T::kExact) {
#pragma unroll
    for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
      for (float& value : state.out[block])
        value += (Side::kAffine ? 1.0f : -0.5f * Side::kLevels) *
                 state.minima[value_step(Side::side(), block) / Side::kStepsInGroup];
  }
}

template <typename T>
__device__ __forceinline__ typename T::Record& record_at(const DecodeParams& p, const typename T::Shared& shared,
                                                         int place) {
  return static_cast<typename T::Record*>(p.partials)[record_of(static_cast<int>(gridDim.x), shared.parts[place])];
}

/// Stores the partial result of a block with one team: each warp has all tokens of its four heads.
template <typename T>
__device__ __forceinline__ void leave_alone(const DecodeParams& p, typename T::Shared& shared, int place, int stage,
                                            int member, int lane, const State<T>& state) {
  const int g = lane >> 2, head = 4 * member + (lane & 3);
  typename T::Record& record = record_at<T>(p, shared, place);
#pragma unroll
  for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      record.value[head][value_channel(T::VSide::side(), 16 * block + 8 * i + g)] = state.out[block][i];
  if (g == 0) record.state[head] = make_float2(state.max, state.sum);
  ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
  ptx::mbarrier_arrive(ptx::shared_address(&shared.left[place]));
}

/// Stores the share of one of several teams; the last warp of the block merges the shares.
/// @param parity  phase of the item's share barrier (`settled`)
template <typename T>
__device__ __forceinline__ void leave_share(const DecodeParams& p, typename T::Shared& shared, int place, int stage,
                                            int team, int member, int lane, const State<T>& state, unsigned parity) {
  constexpr int kDim = T::kHeadDim, kQuads = kDim / 4;
  const int g = lane >> 2, t = lane & 3;
  if constexpr (T::kTeam > 1) ptx::bar_sync(1 + team, 32 * T::kTeam);  // all warps of the team have read the stage
  __syncwarp();
  // Channels of head t are swizzled by 8 t, because the four heads would otherwise have bank conflicts.
  float* share = reinterpret_cast<float*>(shared.stages[stage]) + member * 4 * kDim;
#pragma unroll
  for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      share[t * kDim + (value_channel(T::VSide::side(), 16 * block + 8 * i + g) ^ (8 * t))] = state.out[block][i];
  if (g == 0) shared.states[place][team * T::kTeam + member][t] = make_float2(state.max, state.sum);
  if (member == 0 && lane == 0) shared.ends[place][team] = stage;
#if __CUDA_ARCH__ >= 900
  ptx::fence_proxy_async();  // the stage's next content is written by the async proxy (bulk copy)
#endif
  ptx::mbarrier_arrive(ptx::shared_address(&shared.settled[place]));
  __syncwarp();
  int there = 0;
  if (lane == 0) there = atomicAdd(&shared.shares[place], 1);
  if (__shfl_sync(kAll, there, 0) != T::kWarps - 1) return;

  // Already complete; the wait only acquires what the other warps wrote.
  ptx::mbarrier_wait(ptx::shared_address(&shared.settled[place]), parity);
  typename T::Record& record = record_at<T>(p, shared, place);
#pragma unroll 4
  for (int i = lane; i < T::kHeads * kQuads; i += 32) {
    const int head = i / kQuads, m = head / 4, h = head % 4, quad = i % kQuads;
    float max = kMinusInf, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < T::kTeams; ++w) max = fmaxf(max, shared.states[place][w * T::kTeam + m][h].x);
    float4 values = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < T::kTeams; ++w) {
      const float2 theirs = shared.states[place][w * T::kTeam + m][h];
      const float factor = theirs.x == kMinusInf ? 0.0f : ptx::ex2(theirs.x - max);
      const float* from = reinterpret_cast<const float*>(shared.stages[shared.ends[place][w]]) + m * 4 * kDim;
      const float4 v = *reinterpret_cast<const float4*>(from + h * kDim + ((4 * quad) ^ (8 * h)));
      add_scaled(values, factor, v);
      sum = fmaf(factor, theirs.y, sum);
    }
    reinterpret_cast<float4*>(record.value[head])[quad] = values;
    if (quad == 0) record.state[head] = make_float2(max, sum);
  }
  if (lane == 0) shared.shares[place] = 0;
#pragma unroll
  for (int w = 0; w < T::kTeams; ++w)
    for (int i = 0; i < T::kTeam; ++i) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[shared.ends[place][w]]));
  ptx::mbarrier_arrive(ptx::shared_address(&shared.left[place]));
}

}  // namespace kvq::decode
