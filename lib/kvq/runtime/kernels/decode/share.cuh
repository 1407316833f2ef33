#pragma once

#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/four_rows.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

#include <type_traits>

/// The end of a work tile in a block. A share is the sum of one consumer warp over its stages. The consumer warps store
/// their shares in the stages that they read last, and merge them into one partial result in global memory: up to eight
/// rows at a time, because a stage has room for these.
namespace kvq::decode {

/// Stores a consumer warp's share and merges all of them. All consumer warps call it, with neighboring stages.
/// @param attention  FourRows or ManyRows
/// @param odd        0 and 1 in turn: a consumer warp may store states while others still read the ones before
/// @param flags      of the stage: kStageExactPart
template <typename T, typename Attention>
__device__ __forceinline__ void store_share(const DecodeKernelParams& p, typename T::DecodeShared& shared, int buffer,
                                            int stage, int warp, int lane, const Attention& attention, unsigned odd,
                                            int flags) {
  constexpr int kRows = T::kHeads / T::kRowBlocks;  // at a time
  static_assert(kRows * T::kSums * 4 <= T::kStageBytes);
  // Channels are swizzled by row, because the rows that lanes store at once would otherwise have bank conflicts.
  constexpr int kRowsOfLane = T::kManyRows ? 2 : 1;  // neighboring rows
  const auto swizzle = [](int row) { return row / kRowsOfLane % 4 * 8; };
  const auto stage_of = [&](int w) {
    const int at = stage - warp + w;
    return at + (at < 0 ? T::kStages : at >= T::kStages ? -T::kStages : 0);
  };
  const auto share_of = [&](int w) { return reinterpret_cast<float*>(shared.stages[stage_of(w)]); };
  const auto wait_for_consumers = [] { ptx::bar_sync(1, T::kConsumerThreads); };
  auto& states = shared.states[odd];
  typename T::Partial& partial = static_cast<typename T::Partial*>(
      p.partials)[partial_index(static_cast<int>(gridDim.x), shared.partial_ids[buffer])];

  __syncwarp();  // all lanes have read the stage
  if (lane < 4)
    attention.for_each_state(lane, [&](int row, const SoftmaxState& state) {
      // A share without any score is left out of merges. One whose scores are all NaN must not be.
      const bool is_nan = state.sum != state.sum && state.empty();
      states[warp][row] = make_float2(is_nan ? 0.0f : state.max, state.sum);
    });
  // Merges the shares' rows of a row block, of so many values each, into those behind `first_value` in the partial
  // result.
  const auto merge_shares = [&](auto dim, int block, int first_value) {
    constexpr int kDim = dim.value, kQuads = kDim / 4;
    wait_for_consumers();
#pragma unroll
    for (int i = warp * 32 + lane; i < kRows * kQuads; i += T::kConsumerThreads) {
      const int in_block = i / kQuads, quad = i % kQuads, row = block * kRows + in_block;
      SoftmaxState of_warp[T::kConsumerWarps], merged;
#pragma unroll
      for (int w = 0; w < T::kConsumerWarps; ++w) {
        const float2 state = states[w][row];
        of_warp[w] = {state.x, state.y};
        merged.raise(state.x);
      }
      float4 values = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < T::kConsumerWarps; ++w)
        add_scaled(values, merged.add(of_warp[w], ptx::ex2),
                   *reinterpret_cast<const float4*>(share_of(w) + in_block * kDim + ((4 * quad) ^ swizzle(in_block))));
      reinterpret_cast<float4*>(partial.value[row] + first_value)[quad] = values;
      if (quad == 0 && first_value == 0) partial.state[row] = make_float2(merged.max, merged.sum);
    }
  };
#pragma unroll
  for (int block = 0; block < T::kRowBlocks; ++block) {
    if (block > 0) wait_for_consumers();  // all have read the rows before
    const auto channel_of = [](int place) {
      if constexpr (T::kTable)
        return table_value_channel(T::VSide::kBits, place);
      else
        return value_channel(T::VSide::side(), place);
    };
    attention.for_each_value(block, lane, [&](int row, int place, float value) {
      share_of(warp)[row * T::kSums + (channel_of(place) ^ swizzle(row))] = value;
    });
    if constexpr (T::kTable) {
      if (p.cache.windows.exist() && (flags & kStageExactPart)) {
        __syncwarp();  // another lane wrote the channel
        attention.for_each_exact_value(exact_of<T>(shared, warp, lane), lane, [&](int row, int channel, float value) {
          share_of(warp)[row * T::kSums + (channel ^ swizzle(row))] += value;
        });
      }
    }
    merge_shares(std::integral_constant<int, T::kSums>{}, block, 0);
  }
  if constexpr (T::kLinear) {
    if (!p.cache.windows.exist()) {
      // Nobody reads sums of exact tokens.
    } else if (flags & kStageExactPart) {
      wait_for_consumers();
      attention.for_each_exact_value(exact_of<T>(shared, warp, lane), lane, [&](int row, int channel, float value) {
        share_of(warp)[row * T::kHeadDim + (channel ^ swizzle(row))] = value;
      });
      merge_shares(std::integral_constant<int, T::kHeadDim>{}, 0, T::kSums);
    } else {
      constexpr int kQuads = T::kHeadDim / 4;
#pragma unroll
      for (int i = warp * 32 + lane; i < kRows * kQuads; i += T::kConsumerThreads)
        reinterpret_cast<float4*>(partial.value[i / kQuads] + T::kSums)[i % kQuads] = make_float4(0, 0, 0, 0);
    }
  }
  // All consumer threads have read the stages of all consumer warps. Each arrives for itself at all of them, because
  // racecheck does not follow a read through a block barrier to an arrival of another warp.
  ptx::fence_proxy_async();  // the next content of the stages is written by the async proxy (bulk copy)
#pragma unroll
  for (int w = 0; w < T::kConsumerWarps; ++w) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage_of(w)]));
  ptx::mbarrier_arrive(ptx::shared_address(&shared.partials_stored[buffer]));
}

}  // namespace kvq::decode
