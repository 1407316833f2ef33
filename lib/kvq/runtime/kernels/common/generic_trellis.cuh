#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/constants.cuh>

/// The codes of any trellis (packing.md (d)) by a warp: the two Viterbi runs, with survivors in memory of the caller.
/// Those that kvq ships are searched faster by trellis_search.cuh.
namespace kvq::generic {

constexpr int kMostTrellisStates = 256;

/// A trellis that is not known (is_known_trellis()), and what a warp's search of it needs.
struct TrellisSearch {
  const float* values;  ///< [2^(b (m + 1))] by window
  int bits, memory;
  std::byte* shared;  ///< trellis_search_bytes()

  __device__ __forceinline__ int states() const { return 1 << (bits * memory); }
  /// [states] after an even or odd number of steps.
  __device__ __forceinline__ float* cost(int steps) const {
    return reinterpret_cast<float*>(shared) + (steps & 1) * states();
  }
  __device__ __forceinline__ std::uint8_t* oldest(int step) const {
    return reinterpret_cast<std::uint8_t*>(cost(0) + 2 * states()) + step * states();
  }
  __device__ __forceinline__ int before(int state, int step) const {
    return state >> bits | static_cast<int>(oldest(step)[state]) << (bits * (memory - 1));
  }
};

/// Step number `step`: costs of all states after channel y, and the code that each survivor drops, the smallest of
/// equal ones. All lanes of a warp call it.
__device__ __forceinline__ void trellis_step(const TrellisSearch& trellis, float y, int step, int lane) {
  const int states = trellis.states(), branches = 1 << trellis.bits;
  const float* from = trellis.cost(step);
  for (int state = lane; state < states; state += 32) {
    float best = 0.0f;
    int code = 0;
    for (int p = 0; p < branches; ++p) {
      const int window = state + p * states;
      const float e = __fsub_rn(y, trellis.values[window]),
                  reached = __fadd_rn(from[window >> trellis.bits], __fmul_rn(e, e));
      if (p == 0 || reached < best) best = reached, code = p;
    }
    trellis.cost(step + 1)[state] = best;
    trellis.oldest(step)[state] = static_cast<std::uint8_t>(code);
  }
  __syncwarp();
}

/// The state of smallest cost after a number of steps, the first of equal ones.
__device__ __forceinline__ int cheapest_state(const TrellisSearch& trellis, int steps, int lane) {
  const int none = kMostTrellisStates;
  float cost = -kMinusInf;
  int best = none;
  const auto take = [&](float other, int state) {
    if (state != none && (best == none || other < cost || (other == cost && state < best))) cost = other, best = state;
  };
  for (int state = lane; state < trellis.states(); state += 32) take(trellis.cost(steps)[state], state);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) take(__shfl_xor_sync(kAll, cost, step), __shfl_xor_sync(kAll, best, step));
  return best;
}

/// All lanes of a warp call it. Not inlined, because only trellises that kvq does not ship need it. @param y  [count]
/// in shared memory
/// @param codes  [count]
static __device__ __noinline__ void search_trellis(const TrellisSearch trellis, const float* y, int count,
                                                   std::uint8_t* codes, int lane) {
  const int states = trellis.states(), length = min(count, kSeamLength);
  // 1. The seam: any state may begin.
  for (int state = lane; state < states; state += 32) trellis.cost(0)[state] = 0.0f;
  __syncwarp();
  for (int i = 0; i < 2 * length; ++i)
    trellis_step(trellis, i < length ? y[count - length + i] : y[i - length], i, lane);
  int seam = cheapest_state(trellis, 2 * length, lane);
  for (int i = 2 * length; i-- > length;) seam = trellis.before(seam, i);
  __syncwarp();  // all lanes have read the survivors
  // 2. The group, from the seam's state to the same one.
  for (int state = lane; state < states; state += 32) trellis.cost(0)[state] = state == seam ? 0.0f : -kMinusInf;
  __syncwarp();
  for (int i = 0; i < count; ++i) trellis_step(trellis, y[i], i, lane);
  if (lane == 0)
    for (int i = count; i-- > 0;) {
      codes[i] = static_cast<std::uint8_t>(seam & ((1 << trellis.bits) - 1));
      seam = trellis.before(seam, i);
    }
  __syncwarp();
}

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
