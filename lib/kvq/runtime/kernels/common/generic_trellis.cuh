#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/constants.cuh>

/// The codes of any trellis (packing.md (d)) by a warp, with survivors in memory of the caller. Those that kvq ships
/// are searched faster by trellis_search.cuh if they search integers.
namespace kvq::generic {

constexpr int kMostTrellisStates = 256, kMostTrellisBits = 8;

/// A trellis, and what a warp's search of it needs. @tparam Cost  float, or int for the search in integers
template <typename Cost>
struct TrellisSearch {
  const float* table;  ///< [2^(b (m + 1))] values by window; of integers also as many costs by window, and the taps
  int bits, memory;
  std::byte* shared;  ///< trellis_search_bytes()

  __device__ __forceinline__ int states() const { return 1 << (bits * memory); }
  __device__ __forceinline__ int branches() const { return 1 << bits; }
  __device__ __forceinline__ const float* costs() const { return table + states() * branches(); }
  __device__ __forceinline__ const float* taps() const { return table + 2 * states() * branches(); }
  /// [states] after an even or odd number of steps.
  __device__ __forceinline__ Cost* cost(int steps) const {
    return reinterpret_cast<Cost*>(shared) + (steps & 1) * states();
  }
  __device__ __forceinline__ std::uint8_t* oldest(int step) const {
    return reinterpret_cast<std::uint8_t*>(cost(0) + 2 * states()) + step * states();
  }
  __device__ __forceinline__ int before(int state, int step) const {
    return state >> bits | static_cast<int>(oldest(step)[state]) << (bits * (memory - 1));
  }
  /// @param of  state -> cost before an even number of steps. All lanes of a warp call it.
  template <typename Of>
  __device__ __forceinline__ void set_costs(int lane, Of of) const {
    for (int state = lane; state < states(); state += 32) cost(0)[state] = of(state);
    __syncwarp();
  }

  /// Step number `step`: costs of all states, and the code that each survivor drops, the smallest of equal ones. All
  /// lanes of a warp call it.
  /// @param kept  number of the step whose survivors they are: `step` or, to be overwritten, another one
  /// @param adds  window -> what the step adds
  template <typename Adds>
  __device__ __forceinline__ void take_step(int step, int kept, int lane, Adds adds) const {
    const Cost* from = cost(step);
    for (int state = lane; state < states(); state += 32) {
      Cost best = 0;
      int code = 0;
      for (int p = 0; p < branches(); ++p) {
        const int window = state + p * states();
        const Cost reached = from[window >> bits] + adds(window);
        if (p == 0 || reached < best) best = reached, code = p;
      }
      cost(step + 1)[state] = best;
      oldest(kept)[state] = static_cast<std::uint8_t>(code);
    }
    __syncwarp();
  }

  /// The state of smallest cost after a number of steps, the first of equal ones.
  __device__ __forceinline__ int cheapest_state(int steps, int lane) const {
    const int none = kMostTrellisStates;
    Cost least = 0;
    int best = none;
    const auto take = [&](Cost other, int state) {
      if (state != none && (best == none || other < least || (other == least && state < best)))
        least = other, best = state;
    };
    for (int state = lane; state < states(); state += 32) take(cost(steps)[state], state);
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      take(__shfl_xor_sync(kAll, least, step), __shfl_xor_sync(kAll, best, step));
    return best;
  }

  /// The codes of the path that is in a state after `count` steps. @param codes  [count]
  __device__ __forceinline__ void store_path(int state, int count, std::uint8_t* codes, int lane) const {
    if (lane == 0)
      for (int i = count; i-- > 0;) {
        codes[i] = static_cast<std::uint8_t>(state & (branches() - 1));
        state = before(state, i);
      }
    __syncwarp();
  }
};

/// The search `binary32`. All lanes of a warp call it. Not inlined, because only trellises need it that kvq does not
/// ship, or no longer.
/// @param y      [count] in shared memory
/// @param codes  [count]
static __device__ __noinline__ void search_trellis(const TrellisSearch<float> trellis, const float* y, int count,
                                                   std::uint8_t* codes, int lane) {
  const int length = min(count, kSeamLength);
  const auto step = [&](float channel, int number) {
    trellis.take_step(number, number, lane, [&](int window) {
      const float e = __fsub_rn(channel, trellis.table[window]);
      return __fmul_rn(e, e);  // take_step() adds it: no operation is fused with a product that has been rounded
    });
  };
  // 1. The seam: any state may begin.
  trellis.set_costs(lane, [](int) { return 0.0f; });
  for (int i = 0; i < 2 * length; ++i) step(i < length ? y[count - length + i] : y[i - length], i);
  int seam = trellis.cheapest_state(2 * length, lane);
  for (int i = 2 * length; i-- > length;) seam = trellis.before(seam, i);
  __syncwarp();  // all lanes have read the survivors
  // 2. The group, from the seam's state to the same one.
  trellis.set_costs(lane, [&](int state) { return state == seam ? 0.0f : -kMinusInf; });
  for (int i = 0; i < count; ++i) step(y[i], i);
  trellis.store_path(seam, count, codes, lane);
}

/// The search `integer`, likewise.
static __device__ __noinline__ void search_integers(const TrellisSearch<int> trellis, const float* y, int count,
                                                    std::uint8_t* codes, int lane) {
  const int bits = trellis.bits, steps = first_steps(count, true);
  const auto step = [&](int channel, int number, int kept) {
    int gains[kMostTrellisBits] = {};
    for (int k = 0; k <= trellis.memory; ++k) {
      const int at = channel + k < count ? channel + k : channel + k - count;
      const int t = max(-kLargestY, min(kLargestY, __float2int_rn(__fmul_rn(y[at], 256.0f))));
      for (int i = 0; i < bits; ++i) gains[i] += t * static_cast<int>(trellis.taps()[k * bits + i]);
    }
    for (int i = 0; i < bits; ++i) gains[i] = (gains[i] + 8192) >> 14;
    trellis.take_step(number, kept, lane, [&](int window) {
      int adds = static_cast<int>(trellis.costs()[window]);
      for (int i = 0; i < bits; ++i) adds += window >> i & 1 ? -gains[i] : gains[i];
      return adds;
    });
  };
  trellis.set_costs(lane, [](int) { return 0; });
  for (int i = 0; i < kWarmUp; ++i) step((i + kWarmUp * (count - 1)) % count, i, 0);
  for (int i = 0; i < steps; ++i) step(i % count, i, i);
  int seam = trellis.cheapest_state(steps, lane);
  for (int i = steps; i-- > 0;) seam = trellis.before(seam, i);
  __syncwarp();  // all lanes have read the survivors
  if (count < kLeastOpen) {
    const int far = kFarInUnits * trellis_unit(bits);
    trellis.set_costs(lane, [&](int state) { return state == seam ? 0 : far; });
    for (int i = 0; i < count; ++i) step(i, i, i);
  }
  trellis.store_path(seam, count, codes, lane);
}
static_assert(kWarmUp % 2 == 0);  // the costs after the warm-up are those before step 0

/// Value of a channel: that of its code and the codes before it, around the end of the group. @param codes  [count]
__device__ __forceinline__ float trellis_value(const float* values, int bits, int memory, const std::uint8_t* codes,
                                               int count, int channel) {
  unsigned window = 0;
  for (int back = memory; back >= 0; --back) {
    const int at = channel - back;
    window = window << bits | codes[at < 0 ? at + count : at];
  }
  return values[window];
}

}  // namespace kvq::generic
