#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/constants.cuh>

#include <type_traits>

/// The search of packing.md (d) for the trellises of which the compiler knows the sizes (is_known_trellis()). A lane
/// has two states that have the same predecessors, and keeps the values of their windows in registers. So a row takes
/// half as many lanes as there are states, and a warp searches several rows at once if there are few states.
namespace kvq::generic {

/// The rows that a warp searches in one call: at most kMostSearched. All are in dynamic shared memory, at so many bytes
/// from its beginning: offsets tell the compiler more than pointers.
struct SearchedRows {
  int count;   ///< rows
  int y;       ///< [count, stride] floats: channels with the scale left out, which the search overwrites with the
               ///< values of the codes; kSeamLength floats before each row are free: the search copies the row's end
               ///< there
  int codes;   ///< [count, code_stride]
  int stride;  ///< floats from row to row of y
  int code_stride;  ///< bytes from row to row of codes
  int channels;     ///< of a row
  int memory;       ///< trellis_search_bytes(), aligned to 16
};
__device__ __forceinline__ std::byte* dynamic_shared(int offset) {
  extern __shared__ __align__(16) std::byte shared[];
  return shared + offset;
}

template <int kBitsArg, int kMemory>
struct KnownTrellis {
  static constexpr int kBits = kBitsArg, kBranches = 1 << kBits, kStates = 1 << (kBits * kMemory);
  static constexpr int kFamilies = kStates / kBranches;  ///< a family: the states with the same predecessors
  static constexpr int kLanes = kStates / 2, kRows = searched_at_once(kBits, kMemory);
  static_assert(kBranches >= 4 && kLanes * kRows <= 32);
  using Survivors = SurvivorsOf<kBits>;  ///< of a state in kSurvivorSteps steps: the codes that it dropped
  static constexpr int kMask = kBranches - 1;

  /// Where the cost of a state is: the predecessors of one family are neighbors.
  static __device__ __forceinline__ int place(int state) { return state % kFamilies * kBranches + state / kFamilies; }

  /// The smallest of costs, the first of equal ones.
  struct Best {
    float cost;
    unsigned code;
  };
  template <int kCount>
  static __device__ __forceinline__ Best best_of(const float* reached) {
    if constexpr (kCount == 1) {
      return {reached[0], 0};
    } else {
      const Best low = best_of<kCount / 2>(reached), high = best_of<kCount / 2>(reached + kCount / 2);
      const bool is_high = high.cost < low.cost;
      return {fminf(low.cost, high.cost), is_high ? high.code | (kCount / 2) : low.code};
    }
  }

  int row, own;                ///< the lane's row of those that are searched at once, its place among the row's lanes
  bool has_row;                ///< else the lane repeats what a lane of the first row does
  int state;                   ///< the first of the lane's two
  int places[2];               ///< of the states' costs, in an order in which lanes store to different banks
  int turn;                    ///< 1: places[0] is of the second state
  float values[2][kBranches];  ///< of the windows that end in the state of places[0], in the other one
  float* costs;                ///< [2, kStates] of the row
  int survivors;               ///< offset of [survivor_units(), kStates] Survivors of the row

  __device__ __forceinline__ KnownTrellis(const float* table, const SearchedRows& rows, int lane)
      : row(lane / kLanes), own(lane % kLanes), has_row(row < min(kRows, rows.count)), state(2 * own) {
    if (!has_row) row = 0;
    // The places of two states of a family are kBranches apart.
    turn = kStates == 64 ? own >> (kBits == 2 ? 2 : 1) & 1 : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      places[i] = place(state + (i ^ turn));
#pragma unroll
      for (int p = 0; p < kBranches; ++p) values[i][p] = __ldg(table + state + (i ^ turn) + p * kStates);
    }
    costs = reinterpret_cast<float*>(dynamic_shared(rows.memory)) + row * 2 * kStates;
    survivors = rows.memory + kRows * 2 * kStates * static_cast<int>(sizeof(float)) +
                row * survivor_units(rows.channels) * kUnitBytes;
  }

  static constexpr int kUnitBytes = kStates * static_cast<int>(sizeof(Survivors));
  /// Of a state in a unit of kSurvivorSteps steps. @param unit  its offset
  static __device__ __forceinline__ Survivors& survivor(int unit, int state) {
    return *reinterpret_cast<Survivors*>(dynamic_shared(unit + state * static_cast<int>(sizeof(Survivors))));
  }
  __device__ __forceinline__ int unit_of(int step) const { return survivors + step / kSurvivorSteps * kUnitBytes; }

  /// The squared errors of a channel, for each of `values`.
  using Squares = float[2][kBranches];
  __device__ __forceinline__ void square_errors(float channel, Squares& squares) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int p = 0; p < kBranches; ++p) {
        const float e = __fsub_rn(channel, values[i][p]);
        squares[i][p] = __fmul_rn(e, e);
      }
  }

  /// One step; adds the codes that the lane's states drop to `dropped`, `shift` bits up.
  /// @param squares  of the step's channel; becomes those of channel `next`, which do not depend on costs
  __device__ __forceinline__ void step(Squares& squares, float next, const float* from, float* to, int shift,
                                       unsigned (&dropped)[2]) const {
    float before[kBranches];
#pragma unroll
    for (int p = 0; p < kBranches; p += 4)
      *reinterpret_cast<float4*>(before + p) = *reinterpret_cast<const float4*>(from + p);
    Best best[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float reached[kBranches];
#pragma unroll
      for (int p = 0; p < kBranches; ++p) reached[p] = __fadd_rn(before[p], squares[i][p]);
      best[i] = best_of<kBranches>(reached);
      if (has_row) to[places[i]] = best[i].cost;
    }
    square_errors(next, squares);
#pragma unroll
    for (int i = 0; i < 2; ++i) dropped[i] |= best[i].code << shift;
    __syncwarp();
  }

  /// Steps from the costs at costs[0] on.
  /// @param y  [steps]; kSurvivorSteps floats behind them are read, too, and not used
  __device__ __forceinline__ void run(const float* y, int steps) const {
    const float* from = costs + 2 * own / kBranches * kBranches;
    Squares squares;
    square_errors(y[0], squares);
    int unit = survivors;
#pragma unroll 1
    for (int first = 0; first < steps; first += kSurvivorSteps, unit += kUnitBytes) {
      unsigned dropped[2] = {};
      float next[kSurvivorSteps];
#pragma unroll
      for (int i = 0; i < kSurvivorSteps; ++i) next[i] = y[first + i + 1];
      if (first + kSurvivorSteps <= steps) {
#pragma unroll
        for (int i = 0; i < kSurvivorSteps; ++i)
          step(squares, next[i], from + i % 2 * kStates, costs + (i + 1) % 2 * kStates, i * kBits, dropped);
      } else {
#pragma unroll
        for (int i = 0; i + 1 < kSurvivorSteps; ++i)
          if (first + i < steps)
            step(squares, next[i], from + i % 2 * kStates, costs + (i + 1) % 2 * kStates, i * kBits, dropped);
      }
      if (has_row)
        survivor(unit, state + turn) = static_cast<Survivors>(dropped[0]),
                               survivor(unit, state + 1 - turn) = static_cast<Survivors>(dropped[1]);
    }
    __syncwarp();
  }

  /// A path that is followed back: the codes before the current step, the oldest one in the highest bits. So the state
  /// is in the highest bits, and the codes behind it are below.
  static constexpr int kStateShift = 32 - kBits * kMemory;
  static_assert(kBits * (kMemory + kSurvivorSteps) <= 32);
  static __device__ __forceinline__ int state_of(unsigned path) { return static_cast<int>(path >> kStateShift); }

  /// Follows the path that is in `state` behind step `end` - 1 back to before step `begin`.
  /// @param windows  null, or where windows go: [end] from step 0 on
  /// @return         the path before step `begin`
  __device__ __forceinline__ unsigned follow_back(int state, int begin, int end, unsigned* windows) const {
    unsigned path = static_cast<unsigned>(state) << kStateShift;
    const auto step_back = [&](int unit, int i) {
      path = __funnelshift_r(path, static_cast<unsigned>(survivor(unit, state_of(path))) >> (i * kBits), kBits);
    };
    // Behind the path before a step are the codes of later steps, so a lane has the window of the i-th of them.
    const auto put_window = [&](int step, int i) {
      windows[step + i] = path >> (kStateShift - kBits * (i + 1)) & (kStates * kBranches - 1);
    };
    const bool puts = windows && has_row;
    const auto step_back_once = [&](int step) {
      step_back(unit_of(step), step % kSurvivorSteps);
      if (puts && own == 0) put_window(step, 0);
    };
    int step = end;
#pragma unroll 1
    while (step > begin && step % kSurvivorSteps != 0) step_back_once(--step);
    int unit = unit_of(step);
#pragma unroll 1
    while (step - kSurvivorSteps >= begin) {
      step -= kSurvivorSteps, unit -= kUnitBytes;
#pragma unroll
      for (int i = kSurvivorSteps; i-- > 0;) step_back(unit, i);
#pragma unroll
      for (int i = 0; i < kSurvivorSteps; i += kLanes)
        if (puts && own + i < kSurvivorSteps) put_window(step, own + i);
    }
#pragma unroll 1
    while (step > begin) step_back_once(--step);
    return path;
  }

  /// The cheapest state after an even number of steps, the first of equal ones.
  __device__ __forceinline__ int cheapest() const {
    const float first = costs[places[0]], second = costs[places[1]], other = turn ? first : second;
    float cost = turn ? second : first;
    int best = state;
    if (other < cost) cost = other, best = state + 1;
#pragma unroll
    for (int away = 1; away < kLanes; away *= 2) {
      const float others = __shfl_xor_sync(kAll, cost, away);
      const int theirs = __shfl_xor_sync(kAll, best, away);
      if (others < cost || (others == cost && theirs < best)) cost = others, best = theirs;
    }
    return best;
  }

  /// Searches rows from number `first` on, as many as at once: y becomes the windows of their codes.
  __device__ __forceinline__ void search(const SearchedRows& rows, int first) const {
    const int length = min(rows.channels, kSeamLength);
    float* y = reinterpret_cast<float*>(dynamic_shared(rows.y)) + (first + row) * rows.stride;
    auto* windows = reinterpret_cast<unsigned*>(y);
    int seam = 0;
    // The seam, where any state may begin, then the row, from the seam's state to the same one. So the path closes, and
    // its first windows have the last codes. It does so where costs are infinite, too: from that channel on both runs
    // drop code 0, the smallest of equal ones.
#pragma unroll 1
    for (int is_row = 0; is_row < 2; ++is_row) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (has_row) costs[places[i]] = !is_row || state + (i ^ turn) == seam ? 0.0f : -kMinusInf;
      __syncwarp();
      const int steps = is_row ? rows.channels : 2 * length;
      run(is_row ? y : y - length, steps);
      if (!is_row) seam = cheapest();
      const unsigned path = follow_back(seam, is_row ? 0 : length, steps, is_row ? windows : nullptr);
      __syncwarp();  // survivors and costs have been read
      if (!is_row) seam = state_of(path);
    }
    __syncwarp();
  }
};

/// Finds the codes of rows and their values. All lanes of a warp call it, behind a barrier after y is written; it ends
/// with one.
/// @param table  [2^(b (m + 1))] values by window
template <int kBits, int kMemory>
__device__ __noinline__ void search_known(const float* table, const SearchedRows rows, int lane) {
  const KnownTrellis<kBits, kMemory> trellis(table, rows, lane);
#pragma unroll 1
  for (int first = 0; first < rows.count; first += trellis.kRows) trellis.search(rows, first);
#pragma unroll 1
  for (int r = 0; r < rows.count; ++r) {
    float* y = reinterpret_cast<float*>(dynamic_shared(rows.y)) + r * rows.stride;
    auto* codes = reinterpret_cast<std::uint8_t*>(dynamic_shared(rows.codes)) + r * rows.code_stride;
#pragma unroll 4
    for (int c = lane; c < rows.channels; c += 32) {
      const unsigned window = __float_as_uint(y[c]);
      codes[c] = static_cast<std::uint8_t>(window & trellis.kMask);
      y[c] = __ldg(table + window);
    }
  }
  __syncwarp();
}

/// Whether the trellis is known; if so, finds codes and values as search_known() does.
__device__ __forceinline__ bool search_if_known(int bits, int memory, const float* table, const SearchedRows& rows,
                                                int lane) {
  if (!is_known_trellis(bits, memory)) return false;
  const int length = min(rows.channels, kSeamLength);
  for (int i = lane; i < rows.count * length; i += 32) {
    float* of = reinterpret_cast<float*>(dynamic_shared(rows.y)) + i / length * rows.stride + i % length;
    of[-length] = of[rows.channels - length];
  }
  __syncwarp();
  if (bits == 2 && memory == 3)
    search_known<2, 3>(table, rows, lane);
  else if (bits == 2 && memory == 2)
    search_known<2, 2>(table, rows, lane);
  else if (bits == 2)
    search_known<2, 1>(table, rows, lane);
  else if (bits == 3 && memory == 2)
    search_known<3, 2>(table, rows, lane);
  else if (bits == 3)
    search_known<3, 1>(table, rows, lane);
  else
    search_known<4, 1>(table, rows, lane);
  return true;
}

}  // namespace kvq::generic
