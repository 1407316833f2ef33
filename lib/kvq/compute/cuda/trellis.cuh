#pragma once

#include <kvq/compute/cuda/coded_groups.cuh>

#include <math_constants.h>

// TrellisGroup's search by a warp. Trellises that trellis_taps() makes by default have 16 or 64 states and search
// integers: for them the number of states and branches is a constant, a lane has the costs of its windows in registers,
// the costs of the states that a lane starts from are neighbors in memory, and survivors are in shared memory. Other
// trellises, and groups that are too long, are searched by loops over states, with survivors in global memory.

namespace kvq::cuda {

/// Memory of one warp that searches a trellis.
struct TrellisMemory {
  float* y;              ///< [count] channels with the scale left out, then the decoded values
  float* costs;          ///< [2, states], also of integers
  int states;            ///< most states of a trellis here
  unsigned* gains;       ///< [gain_words(dim)] in shared memory, if `nearby` is there
  std::uint8_t* nearby;  ///< [steps, kKnownStates] in shared memory, if there is room: the state before each state
  std::uint8_t* oldest;  ///< [steps, states] survivors in global memory, if a trellis needs them

  /// [states] after an even or odd number of steps.
  template <typename Cost>
  __device__ __forceinline__ Cost* cost(int steps) const {
    return reinterpret_cast<Cost*>(costs) + (steps & 1) * states;
  }
};

/// y of a channel in 1/256, within the limits of the search in integers.
__device__ __forceinline__ int integer_of(float y) {
  return max(-kLargestY, min(kLargestY, __float2int_rn(__fmul_rn(y, 256.0f))));
}

/// A search in integers of which the compiler knows the trellis.
template <int kBits, int kMemory>
struct KnownTrellis {
  static constexpr int kBranches = 1 << kBits, kStates = 1 << (kBits * kMemory), kGroups = kStates / kBranches;
  static constexpr int kOwn = kStates > 32 ? kStates / 32 : 1;    ///< states of a lane, which start from the same ones
  static constexpr int kParts = kStates < 32 ? 32 / kStates : 1;  ///< lanes that divide the branches of a state
  static constexpr int kTried = kBranches / kParts;
  static_assert(kStates <= kKnownStates && kOwn <= 2 && kBranches % kOwn == 0 && kGroups % kOwn == 0);
  static_assert(kTried % 4 == 0 && kBits <= 4);
  static constexpr int kOldest = kBits * (kMemory - 1);  ///< where the dropped code is in the state before

  const TrellisMemory& memory;
  int lane, state, part;    ///< the lane's first state, and its part of the branches
  int newest;               ///< the state before without its dropped code, one byte for each of the lane's states
  int costs[kOwn][kTried];  ///< of the lane's windows
  int signs[kOwn][2];       ///< what the newest code pays for the two gains of a word: bytes of +1 or -1

  /// @param table  costs by window
  __device__ __forceinline__ KnownTrellis(const TrellisMemory& memory, const float* table, int lane)
      : memory(memory), lane(lane), state(kParts > 1 ? lane % kStates : lane * kOwn), part(lane / kStates) {
    if (kParts == 1) part = 0;
    newest = (state >> kBits) * (kOwn == 1 ? 1 : 0x101);
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
#pragma unroll
      for (int p = 0; p < kTried; ++p)
        costs[own][p] = static_cast<int>(table[state + own + (part * kTried + p) * kStates]);
#pragma unroll
      for (int w = 0; w < 2; ++w)
        signs[own][w] =
            ((state + own) >> (2 * w) & 1 ? 0xFF : 0x01) | ((state + own) >> (2 * w + 1) & 1 ? 0xFF00 : 0x0100);
    }
  }

  /// Where the cost of a state is. The states that lead to one group of states are neighbors.
  static __device__ __forceinline__ int place(int state) { return state % kGroups * kBranches + state / kGroups; }

  /// One step, from the costs that lead to the lane's states.
  /// @param gains  of the step, two words
  /// @param to     costs after the step, from the place of the lane's first state on
  __device__ __forceinline__ void step(uint2 gains, const int4* from, int* to, std::uint8_t* survivors) const {
    int best[kOwn], oldest[kOwn];  // the dropped code, where the state before has it; of the second state one byte on
#pragma unroll
    for (int four = 0; four < kTried / 4; ++four) {
      const int4 before = from[four];
      const int start[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int own = 0; own < kOwn; ++own)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int p = four * 4 + j, reached = start[j] + costs[own][p];
          const bool better = p == 0 || reached < best[own];
          best[own] = better ? reached : best[own];
          oldest[own] = better ? (part * kTried + p) << (kOldest + 8 * own) : oldest[own];
        }
    }
    // Of equal costs the lower code.
#pragma unroll
    for (int step = kStates; step < 32; step *= 2) {
      const int other = __shfl_xor_sync(kAll, best[0], step), other_oldest = __shfl_xor_sync(kAll, oldest[0], step);
      const bool better = other < best[0] || (other == best[0] && other_oldest < oldest[0]);
      best[0] = better ? other : best[0], oldest[0] = better ? other_oldest : oldest[0];
    }
    if (part == 0) {
      if constexpr (kOwn == 1)
        *survivors = static_cast<std::uint8_t>(oldest[0] + newest);
      else
        *reinterpret_cast<std::uint16_t*>(survivors) = static_cast<std::uint16_t>(oldest[0] + oldest[1] + newest);
#pragma unroll
      for (int own = 0; own < kOwn; ++own) {  // place(state + own)
        const int paid = __dp2a_lo(static_cast<int>(gains.x), signs[own][0], best[own]);
        to[own * kBranches] = kBits > 2 ? __dp2a_lo(static_cast<int>(gains.y), signs[own][1], paid) : paid;
      }
    }
    __syncwarp();
  }

  /// Steps from the costs before an even number of steps. @param gains  of the first one
  __device__ __forceinline__ void run(const uint2* gains, int count) const {
    const auto leading = [&](int steps) {
      return reinterpret_cast<const int4*>(memory.cost<int>(steps) + (state >> kBits) * kBranches) +
             part * (kTried / 4);
    };
    const int4 *even = leading(0), *odd = leading(1);
    int *to_even = memory.cost<int>(0) + place(state), *to_odd = memory.cost<int>(1) + place(state);
    std::uint8_t* survivors = memory.nearby + state;
#pragma unroll 1
    for (int i = 0; i + 1 < count; i += 2, survivors += 2 * kStates) {
      step(gains[i], even, to_odd, survivors);
      step(gains[i + 1], odd, to_even, survivors + kStates);
    }
    if (count % 2 != 0) step(gains[count - 1], even, to_odd, survivors);
  }

  /// The state of least cost after a number of steps, the first of equal ones.
  __device__ __forceinline__ int best_state(int steps) const {
    int cost = 0, best = kStates;
    const auto take = [&](int other, int z) {
      if (z < kStates && (best == kStates || other < cost || (other == cost && z < best))) cost = other, best = z;
    };
    for (int z = lane; z < kStates; z += 32) take(memory.cost<int>(steps)[place(z)], z);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) take(__shfl_xor_sync(kAll, cost, step), __shfl_xor_sync(kAll, best, step));
    return best;
  }

  /// X of packing.md for all steps of the first run. @param taps  [kBits (kMemory + 1)]
  __device__ __forceinline__ void make_gains(const float* taps, int count) const {
    for (int i = lane; i < count; i += 32) memory.y[i] = __int_as_float(integer_of(memory.y[i]));
    __syncwarp();
    const int steps = kWarmUp + max(count, kWarmUp);  // of the longer run
    for (int i = lane; i < steps; i += 32) {
      int channel = (i + kWarmUp * (count - 1)) % count, sums[4] = {};
#pragma unroll
      for (int k = 0; k <= kMemory; ++k) {
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit)
          sums[bit] += __float_as_int(memory.y[channel]) * static_cast<int>(taps[k * kBits + bit]);
        channel = channel + 1 == count ? 0 : channel + 1;
      }
#pragma unroll
      for (int w = 0; w < 2; ++w)
        memory.gains[2 * i + w] = (static_cast<unsigned>((sums[2 * w] + 8192) >> 14) & 0xFFFFu) |
                                  static_cast<unsigned>((sums[2 * w + 1] + 8192) >> 14) << 16;
    }
    __syncwarp();
  }

  /// The codes of the channels, in the lowest bits of memory.nearby[i * kStates].
  __device__ __forceinline__ void search(const float* taps, int count) const {
    make_gains(taps, count);
    const auto* gains = reinterpret_cast<const uint2*>(memory.gains);
    const int steps = first_steps(count);
    const auto set_costs = [&](auto of) {
      for (int z = lane; z < kStates; z += 32) memory.cost<int>(0)[place(z)] = of(z);
      __syncwarp();
    };
    set_costs([](int) { return 0; });
    run(gains, kWarmUp);
    run(gains + kWarmUp, steps);
    int seam = best_state(steps);
    for (int i = steps; i-- > 0;) seam = memory.nearby[i * kStates + seam];
    __syncwarp();
    if (count < kLeastOpen) {
      set_costs([&](int z) { return z == seam ? 0 : kFarInUnits * trellis_unit(kBits); });
      run(gains + kWarmUp, count);
    }
    if (lane == 0)
      for (int i = count; i-- > 0;) {
        const int before = memory.nearby[i * kStates + seam];
        memory.nearby[i * kStates] = static_cast<std::uint8_t>(seam);
        seam = before;
      }
    __syncwarp();
  }
};

/// A search of any trellis, with survivors in global memory. @tparam Cost  float, or int for the search in integers
template <typename Cost>
struct AnyTrellis {
  const CodedGroup& group;
  const TrellisMemory& memory;
  int lane, branches, states;

  __device__ __forceinline__ AnyTrellis(const CodedGroup& group, const TrellisMemory& memory, int lane)
      : group(group), memory(memory), lane(lane), branches(1 << group.bits), states(1 << (group.bits * group.memory)) {}

  __device__ __forceinline__ int step_back(int state, int step) const {
    return state >> group.bits | static_cast<int>(memory.oldest[step * states + state])
                                     << (group.bits * (group.memory - 1));
  }
  template <typename Of>
  __device__ __forceinline__ void set_costs(Of of) const {
    for (int z = lane; z < states; z += 32) memory.cost<Cost>(0)[z] = of(z);
    __syncwarp();
  }
  /// Step number `step`. All lanes call it. @param adds  window -> what the step adds
  template <typename Adds>
  __device__ __forceinline__ void take_step(int step, Adds adds) const {
    const Cost* from = memory.cost<Cost>(step);
    for (int state = lane; state < states; state += 32) {
      Cost best = 0;
      int code = 0;
      for (int p = 0; p < branches; ++p) {
        const int window = state + p * states;
        const Cost reached = from[window >> group.bits] + adds(window);
        if (p == 0 || reached < best) best = reached, code = p;
      }
      memory.cost<Cost>(step + 1)[state] = best;
      memory.oldest[step * states + state] = static_cast<std::uint8_t>(code);
    }
    __syncwarp();
  }
  /// The state before step `first` of the cheapest path after `steps` steps.
  __device__ __forceinline__ int seam(int steps, int first) const {
    int state = 0;
    if (lane == 0) {
      const Cost* cost = memory.cost<Cost>(steps);
      for (int z = 1; z < states; ++z)
        if (cost[z] < cost[state]) state = z;
      for (int i = steps; i-- > first;) state = step_back(state, i);
    }
    state = __shfl_sync(kAll, state, 0);
    __syncwarp();
    return state;
  }
  /// The codes of the path to `state`, in memory.oldest[i * states].
  __device__ __forceinline__ void keep_codes(int state) const {
    if (lane == 0)
      for (int i = group.count; i-- > 0;) {
        const int code = state & (branches - 1);
        state = step_back(state, i);
        memory.oldest[i * states] = static_cast<std::uint8_t>(code);
      }
    __syncwarp();
  }
};

/// The codes of the channels, in memory.oldest[i * states].
__device__ __forceinline__ void search_any(const CodedGroup& group, const TrellisMemory& memory, int lane) {
  const AnyTrellis<float> trellis(group, memory, lane);
  const int count = group.count, length = min(count, kSeamLength);
  const auto step = [&](float y, int number) {
    trellis.take_step(number, [&](int window) {
      const float e = y - group.table[window];
      return __fmul_rn(e, e);
    });
  };
  trellis.set_costs([](int) { return 0.0f; });
  for (int i = 0; i < 2 * length; ++i) step(i < length ? memory.y[count - length + i] : memory.y[i - length], i);
  const int seam = trellis.seam(2 * length, length);
  trellis.set_costs([&](int z) { return z == seam ? 0.0f : CUDART_INF_F; });
  for (int i = 0; i < count; ++i) step(memory.y[i], i);
  trellis.keep_codes(seam);
}

/// The same in integers.
__device__ __forceinline__ void search_any_integers(const CodedGroup& group, const TrellisMemory& memory, int lane) {
  const AnyTrellis<int> trellis(group, memory, lane);
  const int bits = group.bits, count = group.count, steps = first_steps(count);
  const float *costs = group.table + trellis.states * trellis.branches,
              *taps = costs + trellis.states * trellis.branches;
  const auto step = [&](int channel, int number) {
    int gains[8] = {};
    for (int k = 0; k <= group.memory; ++k) {
      const int t = integer_of(memory.y[channel + k < count ? channel + k : channel + k - count]);
      for (int i = 0; i < bits; ++i) gains[i] += t * static_cast<int>(taps[k * bits + i]);
    }
    for (int i = 0; i < bits; ++i) gains[i] = (gains[i] + 8192) >> 14;
    trellis.take_step(number, [&](int window) {
      int adds = static_cast<int>(costs[window]);
      for (int i = 0; i < bits; ++i) adds += window >> i & 1 ? -gains[i] : gains[i];
      return adds;
    });
  };
  trellis.set_costs([](int) { return 0; });
  for (int i = 0; i < kWarmUp; ++i) step((i + kWarmUp * (count - 1)) % count, i);
  for (int i = 0; i < steps; ++i) step(i % count, i);
  const int seam = trellis.seam(steps, 0);
  if (count < kLeastOpen) {
    trellis.set_costs([&](int z) { return z == seam ? 0 : kFarInUnits * trellis_unit(bits); });
    for (int i = 0; i < count; ++i) step(i, i);
  }
  trellis.keep_codes(seam);
}

/// Replaces the channels in memory.y by the values of the codes that the search finds. All lanes call it.
__device__ __forceinline__ void replace_by_values(const CodedGroup& group, const TrellisMemory& memory, int lane) {
  const int bits = group.bits, count = group.count, windows = 1 << (bits * (group.memory + 1));
  const std::uint8_t* codes = memory.nearby;
  const int stride = 1 << (bits * group.memory);
  const float *costs = group.table + windows, *taps = costs + windows;
  if (memory.nearby == nullptr || !group.integers || !is_known_trellis(bits, group.memory)) {
    if (group.integers)
      search_any_integers(group, memory, lane);
    else
      search_any(group, memory, lane);
    codes = memory.oldest;
  } else if (bits == 2) {
    KnownTrellis<2, 3>(memory, costs, lane).search(taps, count);
  } else if (bits == 3) {
    KnownTrellis<3, 2>(memory, costs, lane).search(taps, count);
  } else {
    KnownTrellis<4, 1>(memory, costs, lane).search(taps, count);
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
