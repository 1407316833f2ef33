#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/pair.cuh>

/// Rows that a warp rotates and quantizes together: each row has a team of lanes. So a division or a root that a row
/// needs once is one instruction for all rows of the warp.
namespace kvq::generic {

/// A lane's place in a team of kWidth lanes. A row is cut into runs of kRun channels; a lane has four neighboring
/// channels of each run.
template <int kLanes>
struct TeamOf {
  static constexpr int kWidth = kLanes, kRun = 4 * kWidth;
  int row;   ///< among the warp's rows: the team's number
  int lane;  ///< of the team
  int turn;  ///< which of its four neighbors the lane takes first

  __device__ __forceinline__ explicit TeamOf(int warp_lane)
      : row(warp_lane / kWidth), lane(warp_lane % kWidth), turn(warp_lane / 8) {}

  /// Calls f(channel) for the lane's channels below `count`. Lanes that are eight apart take their neighbors in
  /// different orders, because the same neighbor of both is often in the same bank of shared memory.
  /// @tparam kAtOnce  neighbors that the unrolled loop takes together, 1 or 4
  template <int kAtOnce = 1, typename F>
  __device__ __forceinline__ void for_each(int count, F f) const {
#pragma unroll 1
    for (int first = 4 * lane; first < count; first += kRun)
#pragma unroll(kAtOnce)
      for (int i = 0; i < 4; ++i) {
        const int channel = first + (i ^ turn);
        if (channel < count) f(channel);
      }
  }

  /// Whether something holds for all lanes of each team: bit r is that of team r. All lanes of a warp call it.
  static __device__ __forceinline__ unsigned all_of_each(bool holds) {
    const unsigned failed = ~__ballot_sync(kAll, holds);
    unsigned teams = 0;
#pragma unroll
    for (int r = 0; r < 32 / kWidth; ++r)
      if (!(failed >> (r * kWidth) & ~0u >> (32 - kWidth))) teams |= 1u << r;
    return teams;
  }
};

using OneRow = TeamOf<32>;
using ManyRows = TeamOf<32 / kMostSearched>;
static_assert(ManyRows::kWidth == 8);

/// Runs of the longest row.
template <typename Team, int kMostDim>
constexpr int kRuns = (kMostDim + Team::kRun - 1) / Team::kRun;

/// tree() of packing.md of the products x (factor y) of each team's row. All lanes of a warp call it, with one count; a
/// team gets its sum. The order in which a lane takes its neighbors changes no sum. Not inlined, because the kernels
/// around it have many sums, and few instructions fit the multiprocessor's cache.
/// @param x, y  [count] of the team's row
template <typename Team, int kMostDim>
__device__ __noinline__ float tree_of_products(Team team, int count, const float* x, const float* y, float factor) {
  float sums[kRuns<Team, kMostDim>] = {};
#pragma unroll
  for (int run = 0; run < kRuns<Team, kMostDim>; ++run) {
    if (Team::kRun * run >= count) break;
    float terms[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (const int at = Team::kRun * run + 4 * team.lane + (i ^ team.turn); at < count)
        terms[i] = __fmul_rn(x[at], __fmul_rn(factor, y[at]));
    sums[run] = kvq::tree_sum(terms);
  }
#pragma unroll
  for (int step = 1; step < Team::kWidth; step *= 2)
#pragma unroll
    for (float& sum : sums) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, step));
  return kvq::tree_sum(sums);
}

/// What a lane holds of its team's row: its four neighbors of each run, in ascending order.
template <typename Team, int kMostDim>
using TeamRow = float[4 * kRuns<Team, kMostDim>];

/// Calls f(slot of a TeamRow, channel) for the lane's channels of `count`.
template <typename Team, int kMostDim, typename F>
__device__ __forceinline__ void for_each_slot(Team team, int count, F f) {
#pragma unroll
  for (int slot = 0; slot < 4 * kRuns<Team, kMostDim>; ++slot)
    if (const int c = slot / 4 * Team::kRun + 4 * team.lane + slot % 4; c < count) f(slot, c);
}

/// Sums and differences of numbers that are kStep apart.
template <int kStep, int kCount>
__device__ __forceinline__ void butterflies(float (&x)[kCount]) {
#pragma unroll
  for (int j = 0; j + kStep < kCount; ++j) {
    if (j & kStep) continue;
    const float a = x[j], b = x[j + kStep];
    x[j] = a + b, x[j + kStep] = a - b;
  }
}

/// Walsh-Hadamard transform of each block of `order` channels of the teams' rows, without the factor 1 / sqrt(order).
/// All lanes of a warp call it.
template <typename Team, int kCount>
__device__ __forceinline__ void transform(float (&x)[kCount], int order, Team team) {
  if (order >= 2) butterflies<1>(x);
  if (order >= 4) butterflies<2>(x);
#pragma unroll
  for (int half = 1; half < Team::kWidth; half *= 2) {
    if (8 * half > order) break;
    const float sign = team.lane & half ? -1.0f : 1.0f;
#pragma unroll
    for (float& own : x) own = fmaf(own, sign, __shfl_xor_sync(kAll, own, half));
  }
  if (2 * Team::kRun <= order) butterflies<4>(x);
  if (4 * Team::kRun <= order) butterflies<8>(x);
  if (8 * Team::kRun <= order) butterflies<16>(x);
}

}  // namespace kvq::generic
