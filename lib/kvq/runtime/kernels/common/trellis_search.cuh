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
  int y;       ///< [count, stride] floats: channels with the scale left out; kSeamLength floats before each row are
               ///< free: the search copies the row's end there
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
  Survivors* survivors;        ///< [survivor_units(), kStates] of the row

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
    survivors = reinterpret_cast<Survivors*>(dynamic_shared(rows.memory) + kRows * 2 * kStates * sizeof(float)) +
                row * survivor_units(rows.channels) * kStates;
  }

  /// One step; adds the codes that the lane's states drop to `dropped`, `shift` bits up.
  __device__ __forceinline__ void step(float channel, const float* from, float* to, int shift,
                                       unsigned (&dropped)[2]) const {
    float before[kBranches];
#pragma unroll
    for (int p = 0; p < kBranches; p += 4)
      *reinterpret_cast<float4*>(before + p) = *reinterpret_cast<const float4*>(from + p);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float reached[kBranches];
#pragma unroll
      for (int p = 0; p < kBranches; ++p) {
        const float e = __fsub_rn(channel, values[i][p]);
        reached[p] = __fadd_rn(before[p], __fmul_rn(e, e));
      }
      const Best best = best_of<kBranches>(reached);
      dropped[i] |= best.code << shift;
      if (has_row) to[places[i]] = best.cost;
    }
    __syncwarp();
  }

  /// Steps from the costs at costs[0] on. @param y  [steps]
  __device__ __forceinline__ void run(const float* y, int steps) const {
    const float* from = costs + 2 * own / kBranches * kBranches;
#pragma unroll 1
    for (int first = 0; first < steps; first += kSurvivorSteps) {
      unsigned dropped[2] = {};
      if (first + kSurvivorSteps <= steps) {
#pragma unroll
        for (int i = 0; i < kSurvivorSteps; ++i)
          step(y[first + i], from + i % 2 * kStates, costs + (i + 1) % 2 * kStates, i * kBits, dropped);
      } else {
#pragma unroll 1
        for (int i = 0; first + i < steps; ++i)
          step(y[first + i], from + i % 2 * kStates, costs + (i + 1) % 2 * kStates, i * kBits, dropped);
      }
      Survivors* at = survivors + first / kSurvivorSteps * kStates;
      if (has_row)
        at[state + turn] = static_cast<Survivors>(dropped[0]),
                   at[state + 1 - turn] = static_cast<Survivors>(dropped[1]);
    }
    __syncwarp();
  }

  /// Follows a path back from `state` behind step `end` - 1 to before step `begin`.
  /// @param visit  (step, state behind it)
  template <typename Visit>
  __device__ __forceinline__ int before(int state, int begin, int end, Visit visit) const {
    const auto step_back = [&](int step, const Survivors* of, int i) {
      visit(step, state);
      const int dropped = of[state] >> (i * kBits) & kMask;
      state = state >> kBits | dropped << (kBits * (kMemory - 1));
    };
#pragma unroll 1
    for (int first = (end - 1) / kSurvivorSteps * kSurvivorSteps; first > begin - kSurvivorSteps;
         first -= kSurvivorSteps) {
      const Survivors* of = survivors + first / kSurvivorSteps * kStates;
      if (first >= begin && first + kSurvivorSteps <= end) {
#pragma unroll
        for (int i = kSurvivorSteps; i-- > 0;) step_back(first + i, of, i);
      } else {
#pragma unroll 1
        for (int step = min(end, first + kSurvivorSteps); step-- > max(begin, first);)
          step_back(step, of, step - first);
      }
    }
    return state;
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

  /// Searches rows from number `first` on, as many as at once.
  __device__ __forceinline__ void search(const SearchedRows& rows, int first) const {
    const int length = min(rows.channels, kSeamLength);
    const float* y = reinterpret_cast<const float*>(dynamic_shared(rows.y)) + (first + row) * rows.stride;
    auto* codes = reinterpret_cast<std::uint8_t*>(dynamic_shared(rows.codes)) + (first + row) * rows.code_stride;
    int seam = 0;
    // The seam, where any state may begin, then the row, from the seam's state to the same one.
#pragma unroll 1
    for (int is_row = 0; is_row < 2; ++is_row) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (has_row) costs[places[i]] = !is_row || state + (i ^ turn) == seam ? 0.0f : -kMinusInf;
      __syncwarp();
      const int steps = is_row ? rows.channels : 2 * length, begin = is_row ? 0 : length;
      run(is_row ? y : y - length, steps);
      if (!is_row) seam = cheapest();
      seam = before(seam, begin, steps, [&](int i, int state) {
        if (is_row && has_row && own == 0) codes[i] = static_cast<std::uint8_t>(state & kMask);
      });
      __syncwarp();  // survivors and costs have been read
    }
  }
};

/// Finds the codes of rows. All lanes of a warp call it, behind a barrier after y is written; it ends with one.
/// @param table  [2^(b (m + 1))] values by window
template <int kBits, int kMemory>
__device__ __noinline__ void search_known(const float* table, const SearchedRows rows, int lane) {
  KnownTrellis<kBits, kMemory> trellis(table, rows, lane);
  for (int first = 0; first < rows.count; first += trellis.kRows) trellis.search(rows, first);
}

/// Whether the trellis is known; if so, finds the codes as search_known() does.
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
