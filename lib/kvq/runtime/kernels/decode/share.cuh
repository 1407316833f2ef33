#pragma once

#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/stages.cuh>

/// The end of a work tile in a block. A share is the sum of one consumer group over its stages; each warp of the group
/// has four heads of it. The warps store the share in the stage that their group read last. The last warp of the block
/// to do so merges all shares and stores them in global memory as one partial result.
namespace kvq::decode {

/// Sums over lanes, and adds the term that the integer products left out: of the minima (affine), or of the middle of
/// the codes (symmetric).
template <typename T>
__device__ __forceinline__ void finish_share(State<T>& state) {
  using Side = typename T::VSide;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    state.sum += __shfl_xor_sync(kAll, state.sum, step);
#pragma unroll
    for (float& offset : state.offsets) offset += __shfl_xor_sync(kAll, offset, step);
  }
  // A share without any score is left out of merges. One whose scores are all NaN must not be.
  if (state.sum != state.sum && state.reference == kMinusInf) state.reference = 0.0f;
  if constexpr (!T::kExact) {
#pragma unroll
    for (int block = 0; block < T::kChannelBlocks; ++block)
#pragma unroll
      for (float& value : state.out[block])
        value += (Side::kAffine ? 1.0f : -0.5f * Side::kLevels) *
                 state.offsets[value_step(Side::side(), block) / Side::kStepsInGroup];
  }
}

template <typename T>
__device__ __forceinline__ typename T::Partial& partial_at(const DecodeKernelParams& p,
                                                           const typename T::DecodeShared& shared, int buffer) {
  return static_cast<typename T::Partial*>(
      p.partials)[partial_index(static_cast<int>(gridDim.x), shared.partial_ids[buffer])];
}

/// Stores the partial result of a block with one consumer group: each warp has all tokens of its four heads.
template <typename T>
__device__ __forceinline__ void store_partial(const DecodeKernelParams& p, typename T::DecodeShared& shared, int buffer,
                                              int stage, int group_warp, int lane, const State<T>& state) {
  const int g = lane >> 2, head = 4 * group_warp + (lane & 3);
  typename T::Partial& partial = partial_at<T>(p, shared, buffer);
#pragma unroll
  for (int block = 0; block < T::kChannelBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      partial.value[head][value_channel(T::VSide::side(), 16 * block + 8 * i + g)] = state.out[block][i];
  if (g == 0) partial.state[head] = make_float2(state.reference, state.sum);
  ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
  ptx::mbarrier_arrive(ptx::shared_address(&shared.partials_stored[buffer]));
}

/// Stores a warp's heads of the share of one of several consumer groups; the last warp of the block merges the shares.
/// @param parity  phase of the work tile's share barrier
template <typename T>
__device__ __forceinline__ void store_share(const DecodeKernelParams& p, typename T::DecodeShared& shared, int buffer,
                                            int stage, int consumer_group, int group_warp, int lane,
                                            const State<T>& state, unsigned parity) {
  constexpr int kDim = T::kHeadDim, kQuads = kDim / 4;
  const int g = lane >> 2, t = lane & 3;
  if constexpr (T::kConsumerGroupWarps > 1)
    // All warps of the consumer group have read the stage.
    ptx::bar_sync(1 + consumer_group, 32 * T::kConsumerGroupWarps);
  __syncwarp();
  // Channels of head t are swizzled by 8 t, because the four heads would otherwise have bank conflicts.
  float* share = reinterpret_cast<float*>(shared.stages[stage]) + group_warp * 4 * kDim;
#pragma unroll
  for (int block = 0; block < T::kChannelBlocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      share[t * kDim + (value_channel(T::VSide::side(), 16 * block + 8 * i + g) ^ (8 * t))] = state.out[block][i];
  if (g == 0)
    shared.states[buffer][consumer_group * T::kConsumerGroupWarps + group_warp][t] =
        make_float2(state.reference, state.sum);
  if (group_warp == 0 && lane == 0) shared.share_stages[buffer][consumer_group] = stage;
  ptx::fence_proxy_async();  // the stage's next content is written by the async proxy (bulk copy)
  ptx::mbarrier_arrive(ptx::shared_address(&shared.shares_stored[buffer]));
  __syncwarp();
  int done_before = 0;
  if (lane == 0) done_before = atomicAdd(&shared.warps_done[buffer], 1);
  if (__shfl_sync(kAll, done_before, 0) != T::kConsumerWarps - 1) return;

  // Already complete; the wait only acquires what the other warps wrote.
  ptx::mbarrier_wait(ptx::shared_address(&shared.shares_stored[buffer]), parity);
  typename T::Partial& partial = partial_at<T>(p, shared, buffer);
#pragma unroll 4
  for (int i = lane; i < T::kHeads * kQuads; i += 32) {
    const int head = i / kQuads, m = head / 4, h = head % 4, quad = i % kQuads;
    const auto share_of = [&](int w) {
      const float2 state = shared.states[buffer][w * T::kConsumerGroupWarps + m][h];
      return SoftmaxState{state.x, state.y};
    };
    SoftmaxState merged;
#pragma unroll
    for (int w = 0; w < T::kConsumerGroups; ++w) merged.raise(share_of(w).max);
    float4 values = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < T::kConsumerGroups; ++w) {
      const float factor = merged.add(share_of(w), ptx::ex2);
      const float* from = reinterpret_cast<const float*>(shared.stages[shared.share_stages[buffer][w]]) + m * 4 * kDim;
      const float4 v = *reinterpret_cast<const float4*>(from + h * kDim + ((4 * quad) ^ (8 * h)));
      add_scaled(values, factor, v);
    }
    reinterpret_cast<float4*>(partial.value[head])[quad] = values;
    if (quad == 0) partial.state[head] = make_float2(merged.max, merged.sum);
  }
  if (lane == 0) shared.warps_done[buffer] = 0;
#pragma unroll
  for (int w = 0; w < T::kConsumerGroups; ++w)
    for (int i = 0; i < T::kConsumerGroupWarps; ++i)
      ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[shared.share_stages[buffer][w]]));
  ptx::mbarrier_arrive(ptx::shared_address(&shared.partials_stored[buffer]));
}

}  // namespace kvq::decode
