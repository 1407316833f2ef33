#pragma once

#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/decode/centroids.cuh>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/four_rows.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

#include <type_traits>

/// The end of a work tile in a block. A share is the sum of one consumer warp over its stages. The consumer warps store
/// their shares in the stages that they read last, and merge them into one partial result in global memory: four or
/// eight rows at a time, because a stage has room for these.
namespace kvq::decode {

/// The taps (LinearTaps) of four neighboring channels of values, for head_dim 128: 4 l .. 4 l + 3 of lane l. The
/// constructor starts the loads of the first ones.
class ValueTaps {
 public:
  __device__ __forceinline__ ValueTaps(const DeviceRotation& rotation, int head, int lane)
      : count_(rotation.taps.count) {
    const std::int64_t first = (rotation.per_head ? std::int64_t{head} * count_ * kDim : 0) + 4 * lane;
    weights_ = rotation.taps.weights + first, sources_ = rotation.taps.sources + first;
#pragma unroll
    for (int tap = 0; tap < kLoaded; ++tap) loaded_[tap] = tap < count_ ? at(tap) : Four{};
  }
  /// Adds sums of bits to channels. @param sums  by place xor `swizzle`
  __device__ __forceinline__ void add(const float* sums, int swizzle, float4& channels) const {
    const auto add_four = [&](const Four& four) {
      channels.x = fmaf(four.weights.x, sums[four.sources.x ^ swizzle], channels.x);
      channels.y = fmaf(four.weights.y, sums[four.sources.y ^ swizzle], channels.y);
      channels.z = fmaf(four.weights.z, sums[four.sources.z ^ swizzle], channels.z);
      channels.w = fmaf(four.weights.w, sums[four.sources.w ^ swizzle], channels.w);
    };
#pragma unroll
    for (int tap = 0; tap < kLoaded; ++tap)
      if (tap < count_) add_four(loaded_[tap]);
#pragma unroll 4
    for (int tap = kLoaded; tap < count_; ++tap) add_four(at(tap));
  }

 private:
  static constexpr int kDim = 128, kLoaded = 4;
  struct Four {
    float4 weights;
    ushort4 sources;
  };
  __device__ __forceinline__ Four at(int tap) const {
    return {__ldg(reinterpret_cast<const float4*>(weights_ + tap * kDim)),
            __ldg(reinterpret_cast<const ushort4*>(sources_ + tap * kDim))};
  }
  int count_;
  const float* weights_;
  const std::uint16_t* sources_;
  Four loaded_[kLoaded];
};

/// Stores a consumer warp's share and merges all of them. All consumer warps call it, with neighboring stages.
/// @param attention  FourRows or ManyRows
/// @param odd        0 and 1 in turn: a consumer warp may store states while others still read the ones before
/// @param flags      of the stage: kStageExactPart
template <typename T, typename Attention>
__device__ __forceinline__ void store_share(const DecodeKernelParams& p, typename T::DecodeShared& shared, int buffer,
                                            int stage, int warp, int lane, const Attention& attention, unsigned odd,
                                            int flags) {
  constexpr int kRows = T::kShareRows;  // at a time: a part of the rows
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
      if constexpr (T::kValueCentroids) shared.mass_units[odd][warp][row] = attention.masses.log_units;
    });
  // Calls take(row in the part, quad, merged values of the quad) for the thread's quads of a part of the rows, when the
  // shares of all consumer warps are stored. Rows of a share have so many values.
  const auto merge_shares = [&](auto row_values, int part, auto take) {
    constexpr int kValues = row_values.value, kQuads = kValues / 4;
    wait_for_consumers();
#pragma unroll
    for (int i = warp * 32 + lane; i < kRows * kQuads; i += T::kConsumerThreads) {
      const int in_part = i / kQuads, quad = i % kQuads, row = part * kRows + in_part;
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
                   *reinterpret_cast<const float4*>(share_of(w) + in_part * kValues + ((4 * quad) ^ swizzle(in_part))));
      take(in_part, quad, values);
      if (quad == 0) partial.state[row] = make_float2(merged.max, merged.sum);
    }
  };
  const bool any_exact = T::kBitTiles && p.cache.windows.exist() && (flags & kStageExactPart);
#pragma unroll
  for (int part = 0; part < T::kShareParts; ++part) {
    if (part > 0) wait_for_consumers();  // all have read the rows before
    const auto store_values = [&](int row, int quad, const float4& values) {
      reinterpret_cast<float4*>(partial.value[part * kRows + row])[quad] = values;
    };
    [[maybe_unused]] float4 exact_values = make_float4(0, 0, 0, 0);  // of the thread's channels, of linear rows
    if constexpr (T::kLinear) {
      static_assert(kRows == T::kConsumerWarps && T::kHeadDim == 128);
      if (any_exact) {
        attention.for_each_exact_value(exact_of<T>(shared, warp, lane), part, lane,
                                       [&](int row, int channel, float value) {
                                         share_of(warp)[row * T::kHeadDim + (channel ^ swizzle(row))] = value;
                                       });
        merge_shares(std::integral_constant<int, T::kHeadDim>{}, part,
                     [&](int, int, const float4& values) { exact_values = values; });
        wait_for_consumers();  // all have read the sums of exact tokens
      }
    }
    const auto channel_of = [](int place) {
      if constexpr (T::kTable)
        return table_value_channel(T::VSide::kBits, place);
      else
        return value_channel(T::VSide::side(), place);
    };
    attention.for_each_value(part, lane, [&](int row, int place, float value) {
      share_of(warp)[row * T::kSums + (channel_of(place) ^ swizzle(row))] = value;
    });
    if constexpr (T::kTable) {
      if (any_exact) {
        __syncwarp();  // another lane wrote the channel
        attention.for_each_exact_value(exact_of<T>(shared, warp, lane), part, lane,
                                       [&](int row, int channel, float value) {
                                         share_of(warp)[row * T::kSums + (channel ^ swizzle(row))] += value;
                                       });
      }
    }
    const auto keep_values = [&](int row, int quad, const float4& values) {
      *reinterpret_cast<float4*>(share_of(0) + row * T::kSums + ((4 * quad) ^ swizzle(row))) = values;
    };
    if constexpr (T::kValueCentroids) {
      // A warp merges the masses of one row, then adds the centroids' share of 32 channels for all rows.
      static_assert(kRows == T::kConsumerWarps && T::kHeads == kRows && T::kHeadDim == 32 * T::kConsumerWarps);
      merge_shares(std::integral_constant<int, T::kSums>{}, part, keep_values);
      SoftmaxState merged;
      for (int w = 0; w < T::kConsumerWarps; ++w) merged.raise(states[w][warp].x);
      float factors[T::kConsumerWarps];
#pragma unroll
      for (int w = 0; w < T::kConsumerWarps; ++w) {
        const float log_units = shared.mass_units[odd][w][warp];
        factors[w] = log_units < decode::CentroidMasses<T>::kNoUnit ? ptx::ex2(-log_units - merged.max) : 0.0f;
      }
      wait_for_consumers();  // all have read their shares
      float* masses = share_of(1);
      merge_masses<T>(shared, p.cache.code_v.num_centroids, warp, factors, lane, masses);
      wait_for_consumers();
      const int channel = 32 * warp + lane;
      const float4 sums = sum_of_centroids<T>(
          p.cache.code_v, shared.partial_ids[buffer].work_tile % p.cache.num_kv_heads, channel, masses);
      const float of_rows[] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
      for (int row = 0; row < T::kHeads; ++row)
        partial.value[row][channel] = of_rows[row] + share_of(0)[row * T::kSums + (channel ^ swizzle(row))];
    } else if constexpr (!T::kLinear) {
      merge_shares(std::integral_constant<int, T::kSums>{}, part, store_values);
    } else {
      // Each thread has four channels of one row: it sums up bits of the merged share.
      const ValueTaps taps(p.cache.rotation_v, shared.partial_ids[buffer].work_tile % p.cache.num_kv_heads, lane);
      merge_shares(std::integral_constant<int, T::kSums>{}, part, keep_values);
      wait_for_consumers();
      taps.add(share_of(0) + warp * T::kSums, swizzle(warp), exact_values);
      store_values(warp, lane, exact_values);
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
