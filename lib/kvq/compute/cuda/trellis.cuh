#pragma once

#include <kvq/compute/cuda/coded_groups.cuh>

#include <math_constants.h>

// TrellisGroup's search by a warp. Trellises that trellis_taps() makes by default have 16 or 64 states: for them the
// number of states and branches is a constant, a lane has the values of its windows in registers, the costs of the
// states that a lane starts from are neighbors in memory, and survivors are in shared memory. Other trellises, and
// groups that are too long, are searched by loops over states, with survivors in global memory.

namespace kvq::cuda {

/// Memory of one warp that searches a trellis.
struct TrellisMemory {
  float* y;              ///< [-kSeamLength, count) channels with the scale left out, then the decoded values
  float* costs;          ///< [2, states]
  int states;            ///< most states of a trellis here
  std::uint8_t* nearby;  ///< [steps, kKnownStates] in shared memory, if there is room: the state before each state
  std::uint8_t* oldest;  ///< [steps, states] survivors in global memory, if a trellis needs them

  /// [states] after an even or odd number of steps.
  __device__ __forceinline__ float* cost(int steps) const { return costs + (steps & 1) * states; }
};

/// A search of which the compiler knows the trellis.
template <int kBits, int kMemory>
struct KnownTrellis {
  static constexpr int kBranches = 1 << kBits, kStates = 1 << (kBits * kMemory), kGroups = kStates / kBranches;
  static constexpr int kOwn = kStates > 32 ? kStates / 32 : 1;    ///< states of a lane, which start from the same ones
  static constexpr int kParts = kStates < 32 ? 32 / kStates : 1;  ///< lanes that divide the branches of a state
  static constexpr int kTried = kBranches / kParts;
  static_assert(kStates <= kKnownStates && kOwn <= 2 && kBranches % kOwn == 0 && kGroups % kOwn == 0);
  static_assert(kTried % 4 == 0);
  static constexpr int kOldest = kBits * (kMemory - 1);  ///< where the dropped code is in the state before

  const TrellisMemory& memory;
  int lane, state, part;       ///< the lane's first state, and its part of the branches
  int newest;                  ///< the state before without its dropped code, one byte for each of the lane's states
  float values[kOwn][kTried];  ///< of the lane's windows

  __device__ __forceinline__ KnownTrellis(const TrellisMemory& memory, const float* table, int lane)
      : memory(memory), lane(lane), state(kParts > 1 ? lane % kStates : lane * kOwn), part(lane / kStates) {
    if (kParts == 1) part = 0;
    newest = (state >> kBits) * (kOwn == 1 ? 1 : 0x101);
#pragma unroll
    for (int own = 0; own < kOwn; ++own)
#pragma unroll
      for (int p = 0; p < kTried; ++p) values[own][p] = table[state + own + (part * kTried + p) * kStates];
  }

  /// Where the cost of a state is. The states that lead to one group of states are neighbors.
  static __device__ __forceinline__ int place(int state) { return state % kGroups * kBranches + state / kGroups; }

  /// One step, from the costs that lead to the lane's states.
  /// @param to  costs after the step, from the place of the lane's first state on
  __device__ __forceinline__ void step(float channel, const float4* from, float* to, std::uint8_t* survivors) const {
    float best[kOwn];
    int oldest[kOwn];  // the dropped code, where the state before has it; of the second state in the next byte
#pragma unroll
    for (int four = 0; four < kTried / 4; ++four) {
      const float4 costs = from[four];
      const float start[4] = {costs.x, costs.y, costs.z, costs.w};
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int p = four * 4 + j;
          const float e = channel - values[own][p], reached = start[j] + e * e;
          const bool better = p == 0 || reached < best[own];
          best[own] = better ? reached : best[own];
          oldest[own] = better ? (part * kTried + p) << (kOldest + 8 * own) : oldest[own];
        }
    }
    // Of equal costs the lower code.
#pragma unroll
    for (int step = kStates; step < 32; step *= 2) {
      const float other = __shfl_xor_sync(kAll, best[0], step);
      const int other_oldest = __shfl_xor_sync(kAll, oldest[0], step);
      const bool better = other < best[0] || (other == best[0] && other_oldest < oldest[0]);
      best[0] = better ? other : best[0], oldest[0] = better ? other_oldest : oldest[0];
    }
    if (part == 0) {
      if constexpr (kOwn == 1)
        *survivors = static_cast<std::uint8_t>(oldest[0] + newest);
      else
        *reinterpret_cast<std::uint16_t*>(survivors) = static_cast<std::uint16_t>(oldest[0] + oldest[1] + newest);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) to[own * kBranches] = best[own];  // place(state + own)
    }
    __syncwarp();
  }

  /// Steps for channels y.
  __device__ __forceinline__ void run(const float* y, int count) const {
    const auto leading = [&](int steps) {
      return reinterpret_cast<const float4*>(memory.cost(steps) + (state >> kBits) * kBranches) + part * (kTried / 4);
    };
    const float4 *even = leading(0), *odd = leading(1);
    float *to_even = memory.cost(0) + place(state), *to_odd = memory.cost(1) + place(state);
    std::uint8_t* survivors = memory.nearby + state;
    int i = 0;
    if (reinterpret_cast<std::uintptr_t>(y) % sizeof(float4) == 0)
#pragma unroll 1
      for (; i + 3 < count; i += 4, survivors += 4 * kStates) {
        const float4 four = *reinterpret_cast<const float4*>(y + i);
        step(four.x, even, to_odd, survivors);
        step(four.y, odd, to_even, survivors + kStates);
        step(four.z, even, to_odd, survivors + 2 * kStates);
        step(four.w, odd, to_even, survivors + 3 * kStates);
      }
#pragma unroll 1
    for (; i < count; ++i, survivors += kStates)
      step(y[i], i % 2 == 0 ? even : odd, i % 2 == 0 ? to_odd : to_even, survivors);
  }

  /// The state of least cost after an even number of steps, the first of equal ones.
  __device__ __forceinline__ int best_state() const {
    float cost = CUDART_INF_F;
    int best = kStates;
    const auto take = [&](float other, int z) {
      if (z < kStates && (best == kStates || other < cost || (other == cost && z < best))) cost = other, best = z;
    };
    for (int z = lane; z < kStates; z += 32) take(memory.cost(0)[place(z)], z);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) take(__shfl_xor_sync(kAll, cost, step), __shfl_xor_sync(kAll, best, step));
    return best;
  }

  /// The codes of the channels, in the lowest bits of memory.nearby[i * kStates].
  __device__ __forceinline__ void search(int count) const {
    const int length = min(count, kSeamLength);
    for (int i = lane; i < length; i += 32) memory.y[i - length] = memory.y[count - length + i];
    __syncwarp();
    // First the state at the seam, by a run over the last channels and then the first ones, then the search.
    int seam = 0;
#pragma unroll 1
    for (const bool is_first : {true, false}) {
      for (int z = lane; z < kStates; z += 32) memory.cost(0)[place(z)] = is_first || z == seam ? 0.0f : CUDART_INF_F;
      __syncwarp();
      const int steps = is_first ? 2 * length : count;
      run(is_first ? memory.y - length : memory.y, steps);
      if (is_first) seam = best_state();
      if (lane == 0)
        for (int i = steps; i-- > (is_first ? length : 0);) {
          const int before = memory.nearby[i * kStates + seam];
          memory.nearby[i * kStates] = static_cast<std::uint8_t>(seam);
          seam = before;
        }
      seam = __shfl_sync(kAll, seam, 0);
      __syncwarp();
    }
  }
};

/// One Viterbi step: `to` from `from`. All lanes call it.
__device__ __forceinline__ void trellis_step(const CodedGroup& group, float y, const float* from, float* to,
                                             std::uint8_t* oldest, int lane) {
  const int branches = 1 << group.bits, states = 1 << (group.bits * group.memory);
  for (int state = lane; state < states; state += 32) {
    float best = 0.0f;
    int code = 0;
    for (int p = 0; p < branches; ++p) {
      const int window = state + p * states;
      const float e = y - group.table[window], reached = from[window >> group.bits] + e * e;
      if (p == 0 || reached < best) best = reached, code = p;
    }
    to[state] = best;
    oldest[state] = static_cast<std::uint8_t>(code);
  }
  __syncwarp();
}

/// The codes of the channels, in memory.oldest[i * states].
__device__ __forceinline__ void search_any(const CodedGroup& group, const TrellisMemory& memory, int lane) {
  const int bits = group.bits, count = group.count, states = 1 << (bits * group.memory);
  const auto step_back = [&](int state, const std::uint8_t* oldest) {
    return state >> bits | static_cast<int>(oldest[state]) << (bits * (group.memory - 1));
  };
  // As KnownTrellis::search().
  const int length = min(count, kSeamLength);
  for (int z = lane; z < states; z += 32) memory.cost(0)[z] = 0.0f;
  __syncwarp();
  for (int i = 0; i < 2 * length; ++i)
    trellis_step(group, i < length ? memory.y[count - length + i] : memory.y[i - length], memory.cost(i),
                 memory.cost(i + 1), memory.oldest + i * states, lane);
  int seam = 0;
  if (lane == 0) {
    const float* cost = memory.cost(0);  // after an even number of steps
    for (int z = 1; z < states; ++z)
      if (cost[z] < cost[seam]) seam = z;
    for (int i = 2 * length; i-- > length;) seam = step_back(seam, memory.oldest + i * states);
  }
  seam = __shfl_sync(kAll, seam, 0);
  __syncwarp();
  for (int z = lane; z < states; z += 32) memory.cost(0)[z] = z == seam ? 0.0f : CUDART_INF_F;
  __syncwarp();
  for (int i = 0; i < count; ++i)
    trellis_step(group, memory.y[i], memory.cost(i), memory.cost(i + 1), memory.oldest + i * states, lane);
  if (lane == 0)
    for (int i = count; i-- > 0;) {
      const int code = seam & ((1 << bits) - 1);
      seam = step_back(seam, memory.oldest + i * states);
      memory.oldest[i * states] = static_cast<std::uint8_t>(code);
    }
  __syncwarp();
}

/// Replaces the channels in memory.y by the values of the codes that the search finds. All lanes call it.
__device__ __forceinline__ void replace_by_values(const CodedGroup& group, const TrellisMemory& memory, int lane) {
  const int bits = group.bits, count = group.count;
  const std::uint8_t* codes = memory.nearby;
  const int stride = 1 << (bits * group.memory);
  if (memory.nearby == nullptr || !is_known_trellis(bits, group.memory)) {
    search_any(group, memory, lane);
    codes = memory.oldest;
  } else if (bits == 2) {
    KnownTrellis<2, 3>(memory, group.table, lane).search(count);
  } else if (bits == 3) {
    KnownTrellis<3, 2>(memory, group.table, lane).search(count);
  } else {
    KnownTrellis<4, 1>(memory, group.table, lane).search(count);
  }
  // Each value is that of a window of codes, which goes around the end.
  for (int i = lane; i < count; i += 32) {
    int window = 0;
    for (int back = group.memory; back >= 0; --back)
      window = window << bits | (codes[(i >= back ? i - back : i - back + count) * stride] & ((1 << bits) - 1));
    memory.y[i] = group.table[window];
  }
  __syncwarp();
}

/// All lanes call it. x becomes quantized.
__device__ __forceinline__ void code_trellis(const CodedGroup& group, float* x, const TrellisMemory& memory, int lane) {
  const OneWarp team{lane};
  const int count = group.count;
  const float e = energy(team, x, count), d = first_scale(group.type, e, count);
  if (d == 0.0f) {  // the scale is 0, whatever the codes
    for (int i = lane; i < count; i += 32) x[i] = 0.0f;
    __syncwarp();
    return;
  }
  for (int i = lane; i < count; i += 32) memory.y[i] = x[i] / d;
  __syncwarp();
  replace_by_values(group, memory, lane);
  const float scale = stored_scale(team, group, x, [&](int i) { return memory.y[i]; }, e, d);
  __syncwarp();
  for (int i = lane; i < count; i += 32) x[i] = memory.y[i] * scale;
  __syncwarp();
}

}  // namespace kvq::cuda
