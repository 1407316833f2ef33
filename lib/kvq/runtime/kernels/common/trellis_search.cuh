#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/row_teams.cuh>

/// The search of packing.md (d) for the trellises of which the compiler knows the sizes (is_known_trellis()). A lane
/// has one or two states that have the same predecessors, and keeps the values of their windows in registers. A warp
/// searches several rows at once if there are few states (SearchLayout::rows()). With its cost, a path to a state keeps
/// the codes that it dropped in the last steps; so the way back finds the codes of a whole unit of steps with one look.
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

/// The best path to a state: what the search of later states reads of it.
struct Path {
  float cost;
  unsigned codes;  ///< that the path dropped in the last steps, the newest in the lowest bits
};

template <int kBits, int kMemory>
struct KnownTrellis {
  static KVQ_HD constexpr SearchLayout layout() { return {kBits, kMemory}; }
  static constexpr int kBranches = layout().branches(), kStates = layout().states(), kUnitSteps = layout().unit_steps();
  static constexpr int kFamilies = layout().families();  ///< a family: the states with the same predecessors
  static constexpr int kRows = layout().rows(), kLanes = 32 / kRows, kOwn = layout().lane_states();
  /// Bytes from costs before an even number of steps to those before an odd one; codes behind both, likewise.
  static constexpr int kOdd = 4 * kStates, kCodes = 2 * kOdd;
  static_assert(kBranches >= 4 && kLanes * kOwn == kStates && kBits * kUnitSteps <= 32 && kMemory < kUnitSteps);

  int row, own;  ///< the lane's row of those that are searched at once, its place among the row's lanes
  /// Whether the row is there. If not, the lane searches the first one, for nothing.
  bool has_row;
  int states[kOwn];               ///< of the lane, in an order in which lanes store to different banks
  float values[kOwn][kBranches];  ///< of the windows that end in each of them
  // Of the codes of a path to one of the lane's states, its successors take codes * grow + appended.
  unsigned grow = 1, appended[kOwn] = {};
  // Offsets in dynamic shared memory.
  int paths;                        ///< to all states
  int family;                       ///< of these, those to the predecessors of the lane's states
  int places[kOwn];                 ///< of these, those to the lane's states
  int survivors;                    ///< [units, kStates] codes of the paths at the end of each unit
  static constexpr int kAhead = 4;  ///< channels that are loaded ahead
  const float* ahead;               ///< the channels of the next steps
  float channels[kAhead] = {};      ///< the first of them; zeros, because the compiler spills more registers without

  __device__ __forceinline__ KnownTrellis(const float* table, const SearchedRows& rows, int lane)
      : row(lane / kLanes), own(lane % kLanes), has_row(row < rows.count) {
    const int turn = kOwn == 2 ? (kRows > 1 ? row >> 1 : own >> (kBits == 2 ? 2 : 1)) & 1 : 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      states[i] = kOwn * own + (i ^ turn);
#pragma unroll
      for (int p = 0; p < kBranches; ++p) values[i][p] = __ldg(table + states[i] + p * kStates);
    }
    paths = rows.memory + row * layout().row_bytes(rows.channels);
    family = paths + states[0] / kBranches * kBranches * 4;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) places[i] = place(states[i]);
    survivors = paths + layout().paths_bytes();
  }

  static __device__ __forceinline__ unsigned& word(int offset) {
    return *reinterpret_cast<unsigned*>(dynamic_shared(offset));
  }
  static __device__ __forceinline__ float& cost(int offset) {
    return *reinterpret_cast<float*>(dynamic_shared(offset));
  }
  /// Of the path to a state. The paths to the predecessors of a family are neighbors.
  __device__ __forceinline__ int place(int state) const {
    return paths + 4 * (state % kFamilies * kBranches + state / kFamilies);
  }
  /// The code that the states behind a state drop.
  static __device__ __forceinline__ unsigned oldest(int state) {
    return static_cast<unsigned>(state >> (kBits * (kMemory - 1)));
  }

  /// The cheapest path, the first of equal ones.
  template <int kCount>
  static __device__ __forceinline__ Path best_of(const Path* reached) {
    if constexpr (kCount == 1) {
      return reached[0];
    } else {
      const Path low = best_of<kCount / 2>(reached), high = best_of<kCount / 2>(reached + kCount / 2);
      return {fminf(low.cost, high.cost), high.cost < low.cost ? high.codes : low.codes};
    }
  }

  /// The squared errors of a channel, for each of `values`.
  using Squares = float[kOwn][kBranches];
  __device__ __forceinline__ void square_errors(float channel, Squares& squares) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int p = 0; p < kBranches; ++p) {
        const float e = __fsub_rn(channel, values[i][p]);
        squares[i][p] = __fmul_rn(e, e);
      }
  }

  /// One step. It reads and writes different memory. A barrier has to follow.
  /// @tparam kKeeps  whether paths keep codes
  /// @tparam kIsOdd  whether an odd number of steps came before, so that the paths are at kOdd
  /// @param squares  of the step's channel
  /// @param codes    of the paths to the lane's states
  template <bool kKeeps, bool kIsOdd>
  __device__ __forceinline__ void step(const Squares& squares, unsigned (&codes)[kOwn]) const {
    constexpr int kFrom = kIsOdd ? kOdd : 0, kTo = kOdd - kFrom;
    Path before[kBranches];
#pragma unroll
    for (int p = 0; p < kBranches; p += 4) {
      const float4 costs = *reinterpret_cast<const float4*>(dynamic_shared(family + kFrom + 4 * p));
      const uint4 kept = *reinterpret_cast<const uint4*>(dynamic_shared(family + kFrom + kCodes + 4 * p));
      before[p] = {costs.x, kept.x}, before[p + 1] = {costs.y, kept.y};
      before[p + 2] = {costs.z, kept.z}, before[p + 3] = {costs.w, kept.w};
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Path reached[kBranches];
#pragma unroll
      for (int p = 0; p < kBranches; ++p) reached[p] = {__fadd_rn(before[p].cost, squares[i][p]), before[p].codes};
      const Path best = best_of<kBranches>(reached);
      codes[i] = best.codes;
      cost(places[i] + kTo) = best.cost;
      if (kKeeps) word(places[i] + kTo + kCodes) = best.codes * grow + appended[i];
    }
  }

  /// Goes to the channels from y on. kAhead floats behind the last one are read, too, and not used.
  __device__ __forceinline__ void go_to(const float* y) {
    ahead = y;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) channels[i] = y[i];
  }
  /// The next steps. @tparam kKeeps  as step()  @param codes  likewise
  template <bool kKeeps>
  __device__ __forceinline__ void run(int steps, unsigned (&codes)[kOwn]) {
    Squares squares;
    square_errors(channels[0], squares);
#pragma unroll 1
    for (; steps >= kAhead; steps -= kAhead) {
      float now[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) now[i] = channels[i];
      go_to(ahead + kAhead);
      // The squares of the next step do not depend on costs, so the warp takes them before it waits for these.
#pragma unroll
      for (int i = 0; i < kAhead; i += 2) {
        step<kKeeps, false>(squares, codes);
        square_errors(now[i + 1], squares);
        __syncwarp();
        step<kKeeps, true>(squares, codes);
        square_errors(i + 2 < kAhead ? now[i + 2] : channels[0], squares);
        __syncwarp();
      }
    }
#pragma unroll 1
    for (; steps > 0; --steps) {
      step<kKeeps, false>(squares, codes);
      __syncwarp();
      set_paths([](int place, int) { return Path{cost(place + kOdd), word(place + kOdd + kCodes)}; });
      go_to(ahead + 1);
      square_errors(channels[0], squares);
    }
  }

  /// Sets what the successors of the lane's states append. @param of  state -> code
  template <typename Of>
  __device__ __forceinline__ void set_appended(Of of) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) appended[i] = of(states[i]);
  }

  /// Sets the lane's paths before an even number of steps. @param path_of  (place, state) -> Path
  template <typename PathOf>
  __device__ __forceinline__ void set_paths(PathOf path_of) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const Path path = path_of(places[i], states[i]);
      cost(places[i]) = path.cost, word(places[i] + kCodes) = path.codes;
    }
    __syncwarp();
  }

  /// The cheapest path, that to the first one of states with equal costs.
  __device__ __forceinline__ Path cheapest() const {
    int best = states[0];
    float least = cost(places[0]);
    const auto take = [&](float other, int state) {
      if (other < least || (other == least && state < best)) least = other, best = state;
    };
    if (kOwn == 2) take(cost(places[kOwn - 1]), states[kOwn - 1]);
#pragma unroll
    for (int away = 1; away < kLanes; away *= 2)
      take(__shfl_xor_sync(kAll, least, away), __shfl_xor_sync(kAll, best, away));
    return {least, word(place(best) + kCodes)};
  }

  /// Searches rows from number `first` on, as many as at once.
  __device__ __forceinline__ void search(const SearchedRows& rows, int first, const float* table, int lane) {
    const int count = rows.channels, length = min(count, kSeamLength), units = layout().units(count);
    const float* y =
        reinterpret_cast<const float*>(dynamic_shared(rows.y)) + (has_row ? first + row : first) * rows.stride;

    // 1. The steps before the seam, those behind it, then those of the row's units. They share a loop, because few
    // instructions fit the multiprocessor's cache. Those before the seam need no codes: where a step is short, they
    // have a loop of their own.
    int seam = 0;
#pragma unroll 1
    for (int unit = -2; unit < units; ++unit) {
      int steps = kUnitSteps;
      if (unit == -2) {  // any state may begin
        steps = length, grow = 1, set_appended([](int) { return 0u; });
        set_paths([](int, int) { return Path{0.0f, 0}; });
        go_to(y - length);
      } else if (unit == -1) {  // from the seam on a path keeps the state that it had there
        steps = length;
        set_paths([](int place, int state) { return Path{cost(place), static_cast<unsigned>(state)}; });
      } else if (unit == 0) {
        // From the seam's state to the same one. So the path closes, and its first windows have the last codes. It does
        // so where costs are infinite, too: from that channel on both runs drop code 0, the smallest of equal ones.
        seam = static_cast<int>(cheapest().codes);
        __syncwarp();
        set_paths([seam](int, int state) { return Path{state == seam ? 0.0f : -kMinusInf, oldest(state)}; });
        go_to(y);
        // From here on it keeps the codes that it drops. All units but the first one are whole.
        grow = kBranches, set_appended(oldest);
        steps = count - (units - 1) * kUnitSteps;
      }
      unsigned codes[kOwn];
      if (unit == -2 && kBranches == 4)
        run<false>(steps, codes);
      else
        run<true>(steps, codes);
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        if (unit >= 0) word(survivors + unit * layout().unit_bytes() + 4 * states[i]) = codes[i];
    }
    __syncwarp();

    // 2. The way back. The codes that a path dropped first in a unit are the state before it.
    constexpr int kStateShift = kBits * (kUnitSteps - kMemory);
    constexpr unsigned kWordMask = ~0u >> (32 - kBits * kUnitSteps);
    unsigned codes = static_cast<unsigned>(seam) << kStateShift;
    const int stream = rows.memory + layout().stream_at(first + row, count);
#pragma unroll 1
    for (int u = units; u >= 0; --u) {
      if (own == 0 && has_row) word(stream + 4 * u) = codes;
      if (u > 0)
        codes =
            word(survivors + (u - 1) * layout().unit_bytes() + 4 * static_cast<int>(codes >> kStateShift)) & kWordMask;
    }
    __syncwarp();
  }
};

/// Finds the streams of codes of rows. All lanes of a warp call it, behind a barrier after y is written; it ends with
/// one.
/// @param table  [2^(b (m + 1))] values by window
template <int kBits, int kMemory>
__device__ __noinline__ void search_known(const float* table, const SearchedRows rows, int lane) {
  KnownTrellis<kBits, kMemory> trellis(table, rows, lane);
#pragma unroll 1
  for (int first = 0; first < rows.count; first += trellis.kRows) trellis.search(rows, first, table, lane);
}

/// Reads each channel's code and value from the row's stream. The window of a channel is in the codes that its step and
/// the `memory` ones behind it drop. All lanes of a warp call it.
template <typename Team>
__device__ __noinline__ void take_windows(Team team, SearchLayout layout, const float* table, const SearchedRows rows) {
  if (team.row >= rows.count) return;
  const int count = rows.channels, steps = layout.unit_steps(), short_by = layout.units(count) * steps - count;
  const int stream = rows.memory + layout.stream_at(team.row, count);
  const unsigned mask = (1u << layout.bits * (layout.memory + 1)) - 1;
  float* values = reinterpret_cast<float*>(dynamic_shared(rows.y)) + team.row * rows.stride;
  auto* codes = reinterpret_cast<std::uint8_t*>(dynamic_shared(rows.codes)) + team.row * rows.code_stride;
#pragma unroll 1
  for (int c = 4 * team.lane; c < count; c += Team::kRun) {
    // The windows of four neighbors lie in two words.
    const int at = c + short_by, unit = stream + at / steps * 4;
    const std::uint64_t two =
        (std::uint64_t{*reinterpret_cast<const unsigned*>(dynamic_shared(unit))} << layout.bits * steps |
         *reinterpret_cast<const unsigned*>(dynamic_shared(unit + 4))) >>
        layout.bits * (2 * steps - layout.memory - 4 - at % steps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int neighbor = i ^ team.turn;
      const unsigned window = static_cast<unsigned>(two >> layout.bits * (3 - neighbor)) & mask;
      if (c + neighbor >= count) continue;
      codes[c + neighbor] = static_cast<std::uint8_t>(window & ((1u << layout.bits) - 1));
      values[c + neighbor] = __ldg(table + window);
    }
  }
}

/// Whether the trellis is known; if so, finds the rows' codes, and overwrites y with their values. All lanes of a warp
/// call it, as search_known().
template <typename Team>
__device__ __forceinline__ bool search_if_known(Team team, int bits, int memory, const float* table,
                                                const SearchedRows& rows, int lane) {
  if (!is_known_trellis(bits, memory)) return false;
  if (team.row < rows.count) {
    const int length = min(rows.channels, kSeamLength);
    float* y = reinterpret_cast<float*>(dynamic_shared(rows.y)) + team.row * rows.stride;
    team.template for_each<4>(length, [&](int c) { y[c - length] = y[rows.channels - length + c]; });
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
  take_windows(team, {bits, memory}, table, rows);
  __syncwarp();
  return true;
}

}  // namespace kvq::generic
