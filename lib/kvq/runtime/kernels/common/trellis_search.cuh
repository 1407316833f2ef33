#pragma once

#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/row_teams.cuh>

/// The search in integers of packing.md (d) for the trellises of which the compiler knows the sizes
/// (is_known_trellis()). A lane has one or two states that have the same predecessors, and keeps the costs of their
/// windows in registers. A warp searches several rows at once if there are few states (SearchLayout::rows()). With its
/// cost, a path to a state keeps the codes that it dropped in the last steps; so the way back finds the codes of a
/// whole unit of steps with one look.
namespace kvq::generic {

/// The rows that a warp searches in one call: at most kMostSearched. All are in dynamic shared memory, at so many bytes
/// from its beginning: offsets tell the compiler more than pointers.
struct SearchedRows {
  int count;        ///< rows
  int y;            ///< [count, stride] floats: channels with the scale left out, which the search overwrites with the
                    ///< values of the codes
  int codes;        ///< [count, code_stride]
  int stride;       ///< floats from row to row of y
  int code_stride;  ///< bytes from row to row of codes
  int channels;     ///< of a row
  int memory;       ///< SearchLayout::bytes(), aligned to 16
};
__device__ __forceinline__ std::byte* dynamic_shared(int offset) {
  extern __shared__ __align__(16) std::byte shared[];
  return shared + offset;
}

/// The best path to a state: what the search of later states reads of it.
struct Path {
  int cost;
  unsigned codes;  ///< that the path dropped in the last steps, the newest in the lowest bits
};

template <int kBits, int kMemory>
struct KnownTrellis {
  static KVQ_HD constexpr SearchLayout layout() { return {kBits, kMemory}; }
  static constexpr int kBranches = layout().branches(), kStates = layout().states(), kUnitSteps = layout().unit_steps();
  static constexpr int kFamilies = layout().families();  ///< a family: the states with the same predecessors
  static constexpr int kRows = layout().rows(), kLanes = 32 / kRows, kOwn = layout().lane_states();
  static constexpr int kGainWords = layout().gain_words(), kAhead = SearchLayout::kAhead;
  /// Bytes from costs before an even number of steps to those before an odd one; codes behind both, likewise.
  static constexpr int kOdd = 4 * kStates, kCodes = 2 * kOdd;
  /// Where the state before a unit's steps is in the codes that they drop.
  static constexpr int kStateShift = kBits * (kUnitSteps - kMemory);
  static constexpr unsigned kWordMask = ~0u >> (32 - kBits * kUnitSteps);
  static_assert(kBranches >= 4 && kLanes * kOwn == kStates && kBits * kUnitSteps <= 32 && kMemory < kUnitSteps);

  int row, own;  ///< the lane's row of those that are searched at once, its place among the row's lanes
  /// Whether the row is there. If not, the lane searches the first one, for nothing.
  bool has_row;
  int states[kOwn];             ///< of the lane, in an order in which lanes store to different banks
  int costs[kOwn][kBranches];   ///< of the windows that end in each of them
  int signs[kOwn][kGainWords];  ///< what their newest code pays for the two gains of a word: bytes of +1 or -1
  // Of the codes of a path to one of the lane's states, its successors take codes * kBranches + appended.
  unsigned appended[kOwn];
  // Offsets in dynamic shared memory.
  int paths;                                ///< to all states
  int family;                               ///< of these, those to the predecessors of the lane's states
  int places[kOwn];                         ///< of these, those to the lane's states
  int survivors;                            ///< [units, kStates] codes of the paths at the end of each unit
  const unsigned* ahead;                    ///< the gains of the next steps
  unsigned gains[kAhead][kGainWords] = {};  ///< the first of them, which are loaded ahead

  /// @param table  costs by window
  __device__ __forceinline__ KnownTrellis(const float* table, const SearchedRows& rows, int lane)
      : row(lane / kLanes), own(lane % kLanes), has_row(row < rows.count) {
    const int turn = kOwn == 2 ? (kRows > 1 ? row >> 1 : own >> (kBits == 2 ? 2 : 1)) & 1 : 0;
    paths = rows.memory + row * layout().row_bytes(rows.channels);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      states[i] = kOwn * own + (i ^ turn), places[i] = place(states[i]);
      appended[i] = static_cast<unsigned>(states[i] >> (kBits * (kMemory - 1)));  // the code that successors drop
#pragma unroll
      for (int p = 0; p < kBranches; ++p) costs[i][p] = static_cast<int>(__ldg(table + states[i] + p * kStates));
#pragma unroll
      for (int w = 0; w < kGainWords; ++w)
        signs[i][w] = (states[i] >> (2 * w) & 1 ? 0xFF : 0x01) | (states[i] >> (2 * w + 1) & 1 ? 0xFF00 : 0x0100);
    }
    family = paths + states[0] / kBranches * kBranches * 4;
    survivors = paths + layout().paths_bytes();
  }

  static __device__ __forceinline__ unsigned& word(int offset) {
    return *reinterpret_cast<unsigned*>(dynamic_shared(offset));
  }
  static __device__ __forceinline__ int& cost(int offset) { return *reinterpret_cast<int*>(dynamic_shared(offset)); }
  /// Of the path to a state. The paths to the predecessors of a family are neighbors.
  __device__ __forceinline__ int place(int state) const {
    return paths + 4 * (state % kFamilies * kBranches + state / kFamilies);
  }

  /// The cheapest path, the first of equal ones.
  template <int kCount>
  static __device__ __forceinline__ Path best_of(const Path* reached) {
    if constexpr (kCount == 1) {
      return reached[0];
    } else {
      const Path low = best_of<kCount / 2>(reached), high = best_of<kCount / 2>(reached + kCount / 2);
      return {min(low.cost, high.cost), high.cost < low.cost ? high.codes : low.codes};
    }
  }

  /// What the newest codes of the lane's states pay for the gains of a step.
  using OwnCosts = int[kOwn];
  __device__ __forceinline__ void pay(const unsigned (&gain)[kGainWords], OwnCosts& paid) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      paid[i] = 0;
#pragma unroll
      for (int w = 0; w < kGainWords; ++w) paid[i] = __dp2a_lo(static_cast<int>(gain[w]), signs[i][w], paid[i]);
    }
  }

  /// One step. It reads and writes different memory. A barrier has to follow.
  /// @tparam kIsOdd  whether an odd number of steps came before, so that the paths are at kOdd
  /// @param codes    of the paths to the lane's states
  template <bool kIsOdd>
  __device__ __forceinline__ void step(const OwnCosts& paid, unsigned (&codes)[kOwn]) const {
    constexpr int kFrom = kIsOdd ? kOdd : 0, kTo = kOdd - kFrom;
    Path before[kBranches];
#pragma unroll
    for (int p = 0; p < kBranches; p += 4) {
      const int4 reached = *reinterpret_cast<const int4*>(dynamic_shared(family + kFrom + 4 * p));
      const uint4 kept = *reinterpret_cast<const uint4*>(dynamic_shared(family + kFrom + kCodes + 4 * p));
      before[p] = {reached.x, kept.x}, before[p + 1] = {reached.y, kept.y};
      before[p + 2] = {reached.z, kept.z}, before[p + 3] = {reached.w, kept.w};
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Path reached[kBranches];
#pragma unroll
      for (int p = 0; p < kBranches; ++p) reached[p] = {before[p].cost + costs[i][p], before[p].codes};
      const Path best = best_of<kBranches>(reached);
      codes[i] = best.codes;
      cost(places[i] + kTo) = best.cost + paid[i];
      word(places[i] + kTo + kCodes) = best.codes * kBranches + appended[i];
    }
  }

  /// Goes to the gains from `from` on. Those of kAhead steps behind the last one are read, too, and not used.
  __device__ __forceinline__ void go_to(const unsigned* from) {
    ahead = from;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int w = 0; w < kGainWords; ++w) gains[i][w] = from[i * kGainWords + w];
  }
  /// The next steps. @param codes  as step()
  __device__ __forceinline__ void run(int steps, unsigned (&codes)[kOwn]) {
    OwnCosts paid;
    pay(gains[0], paid);
#pragma unroll 1
    for (; steps >= kAhead; steps -= kAhead) {
      unsigned now[kAhead][kGainWords];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int w = 0; w < kGainWords; ++w) now[i][w] = gains[i][w];
      go_to(ahead + kAhead * kGainWords);
      // What the next step pays does not depend on costs, so the warp computes it before it waits for these.
#pragma unroll
      for (int i = 0; i < kAhead; i += 2) {
        step<false>(paid, codes);
        pay(now[i + 1], paid);
        __syncwarp();
        step<true>(paid, codes);
        pay(i + 2 < kAhead ? now[i + 2] : gains[0], paid);
        __syncwarp();
      }
    }
#pragma unroll 1
    for (; steps > 0; --steps) {
      step<false>(paid, codes);
      __syncwarp();
      set_paths([](int place, int) { return Path{cost(place + kOdd), word(place + kOdd + kCodes)}; });
      go_to(ahead + kGainWords);
      pay(gains[0], paid);
    }
  }

  /// Sets the lane's paths before an even number of steps. @param path_of  (place, number of the lane's state) -> Path
  template <typename PathOf>
  __device__ __forceinline__ void set_paths(PathOf path_of) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const Path path = path_of(places[i], i);
      cost(places[i]) = path.cost, word(places[i] + kCodes) = path.codes;
    }
    __syncwarp();
  }

  /// The state with the cheapest path, the first one of equal costs.
  __device__ __forceinline__ int cheapest() const {
    int best = states[0], least = cost(places[0]);
    const auto take = [&](int other, int state) {
      if (other < least || (other == least && state < best)) least = other, best = state;
    };
    if (kOwn == 2) take(cost(places[kOwn - 1]), states[kOwn - 1]);
#pragma unroll
    for (int away = 1; away < kLanes; away *= 2)
      take(__shfl_xor_sync(kAll, least, away), __shfl_xor_sync(kAll, best, away));
    return best;
  }

  /// The way back from a state in the end. The codes that a path dropped first in a unit are the state before it.
  /// @param store  (unit, codes that the path dropped in it): first (units, the state in the end, at the place of the
  ///               codes that one more unit would drop first), then the units from the last one to the first one
  template <typename Store>
  __device__ __forceinline__ void walk_back(int state, int units, Store store) const {
    unsigned codes = static_cast<unsigned>(state) << kStateShift;
    store(units, codes);
#pragma unroll 1
    for (int u = units - 1; u >= 0; --u) {
      codes = word(survivors + u * layout().unit_bytes() + 4 * static_cast<int>(codes >> kStateShift)) & kWordMask;
      store(u, codes);
    }
  }
  /// Where the codes that the first kMemory steps drop are in the first two words of a stream: they are the state
  /// before these steps. All units but the first one are whole.
  static __device__ __forceinline__ int first_codes_at(int steps) {
    return kBits * (2 * kUnitSteps - kMemory - (layout().units(steps) * kUnitSteps - steps));
  }

  /// Searches rows from number `first` on, as many as at once.
  __device__ __forceinline__ void search(const SearchedRows& rows, int first) {
    const int count = rows.channels, own_row = has_row ? first + row : first;
    const auto* own_gains =
        reinterpret_cast<const unsigned*>(dynamic_shared(rows.memory + layout().gains_at(own_row, count)));
    int seam = 0, steps = first_steps(count, true), units = layout().units(steps);
    // The warm-up is unit -1. Both runs share a loop, because few instructions fit the multiprocessor's cache.
    bool second = false;
    set_paths([](int, int) { return Path{0, 0}; });
    go_to(own_gains);
#pragma unroll 1
    for (int unit = -1;; ++unit) {
      if (unit == 0) {
        go_to(own_gains + kWarmUp * kGainWords);
        set_paths([&](int place, int i) {
          const int start = states[i] == seam ? 0 : kFarInUnits * trellis_unit(kBits);
          return Path{second ? start : cost(place), appended[i]};
        });
      }
      unsigned codes[kOwn];
      run(unit < 0 ? kWarmUp : unit > 0 ? kUnitSteps : steps - (units - 1) * kUnitSteps, codes);
      if (unit < 0) continue;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) word(survivors + unit * layout().unit_bytes() + 4 * states[i]) = codes[i];
      if (unit < units - 1) continue;
      __syncwarp();
      if (second) break;
      // The seam's state is that of the cheapest path before the first step.
      std::uint64_t last_two = 0;
      walk_back(cheapest(), units, [&](int, unsigned codes_of_unit) {
        last_two = last_two >> kBits * kUnitSteps | std::uint64_t{codes_of_unit} << kBits * kUnitSteps;
      });
      seam = static_cast<int>(last_two >> first_codes_at(steps)) & (kStates - 1);
      if (count >= kLeastOpen) break;
      second = true, steps = count, units = layout().units(steps), unit = -1;
      __syncwarp();
    }
    const int stream = rows.memory + layout().stream_at(first + row, count);
    walk_back(seam, units, [&](int unit, unsigned codes) {
      if (own == 0 && has_row) word(stream + 4 * unit) = codes;
    });
    if (own == 0 && has_row) {
      // The codes before the first channel are the last ones, whether the path closes or not.
      const std::uint64_t state = std::uint64_t{kStates - 1} << first_codes_at(steps);
      std::uint64_t two = std::uint64_t{word(stream)} << kBits * kUnitSteps | word(stream + 4);
      two = (two & ~state) | std::uint64_t(static_cast<unsigned>(seam)) << first_codes_at(steps);
      word(stream) = static_cast<unsigned>(two >> kBits * kUnitSteps) & kWordMask;
      word(stream + 4) = static_cast<unsigned>(two) & kWordMask;
    }
    __syncwarp();
  }

  /// Computes the gains of all rows, X of packing.md, for the warm-up and the longer run: two gains in a word. It
  /// replaces y by integers, which the search needs no more. All lanes of a warp call it.
  /// @param taps  [kBits (kMemory + 1)]
  static __device__ __forceinline__ void make_gains(const float* taps, const SearchedRows& rows, int lane) {
    int own_taps[kMemory + 1][kBits];
#pragma unroll
    for (int k = 0; k <= kMemory; ++k)
#pragma unroll
      for (int i = 0; i < kBits; ++i) own_taps[k][i] = static_cast<int>(__ldg(taps + k * kBits + i));
    const int count = rows.channels, steps = kWarmUp + search_steps(count, true);
#pragma unroll 1
    for (int r = 0; r < rows.count; ++r) {
      int* y = reinterpret_cast<int*>(dynamic_shared(rows.y)) + r * rows.stride;
#pragma unroll 1
      for (int c = lane; c < count; c += 32)
        y[c] = max(-kLargestY, min(kLargestY, __float2int_rn(__fmul_rn(__int_as_float(y[c]), 256.0f))));
    }
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < rows.count; ++r) {
      const int* y = reinterpret_cast<const int*>(dynamic_shared(rows.y)) + r * rows.stride;
      auto* gains = reinterpret_cast<unsigned*>(dynamic_shared(rows.memory + layout().gains_at(r, count)));
#pragma unroll 1
      for (int at = lane; at < steps; at += 32) {
        // Loops in place of a remainder, which takes more instructions: all but short rows take one turn at most.
        int channel = at - kWarmUp;
#pragma unroll 1
        while (channel < 0) channel += count;
#pragma unroll 1
        while (channel >= count) channel -= count;
        int sums[2 * kGainWords] = {};
#pragma unroll
        for (int k = 0; k <= kMemory; ++k) {
#pragma unroll
          for (int i = 0; i < kBits; ++i) sums[i] += y[channel] * own_taps[k][i];
          channel = channel + 1 == count ? 0 : channel + 1;
        }
#pragma unroll
        for (int w = 0; w < kGainWords; ++w)
          gains[at * kGainWords + w] = (static_cast<unsigned>((sums[2 * w] + 8192) >> 14) & 0xFFFFu) |
                                       static_cast<unsigned>((sums[2 * w + 1] + 8192) >> 14) << 16;
      }
    }
    __syncwarp();
  }
};

/// Finds the streams of codes of rows. All lanes of a warp call it, behind a barrier after y is written; it ends with
/// one.
/// @param table  [2^(b (m + 1))] values by window, as many costs by window, then the taps
template <int kBits, int kMemory>
__device__ __noinline__ void search_known(const float* table, const SearchedRows rows, int lane) {
  constexpr int kWindows = 1 << kBits * (kMemory + 1);
  using Known = KnownTrellis<kBits, kMemory>;
  Known::make_gains(table + 2 * kWindows, rows, lane);
  Known trellis(table + kWindows, rows, lane);
#pragma unroll 1
  for (int first = 0; first < rows.count; first += Known::kRows) trellis.search(rows, first);
}

/// Reads each channel's code and value from the row's stream. The window of a channel is in the codes that its step and
/// the `memory` ones behind it drop. All lanes of a warp call it.
template <typename Team>
__device__ __noinline__ void take_windows(Team team, SearchLayout layout, const float* table, const SearchedRows rows) {
  if (team.row >= rows.count) return;
  const int count = rows.channels, steps = layout.unit_steps(), log_steps = steps == 16 ? 4 : 3;
  const int short_by = layout.units(count) * steps - count;
  const int stream = rows.memory + layout.stream_at(team.row, count);
  const unsigned mask = (1u << layout.bits * (layout.memory + 1)) - 1;
  float* values = reinterpret_cast<float*>(dynamic_shared(rows.y)) + team.row * rows.stride;
  auto* codes = reinterpret_cast<std::uint8_t*>(dynamic_shared(rows.codes)) + team.row * rows.code_stride;
#pragma unroll 1
  for (int c = 4 * team.lane; c < count; c += Team::kRun) {
    // The windows of four neighbors lie in two words.
    const int at = c + short_by, in_unit = at & (steps - 1), unit = stream + (at >> log_steps) * 4;
    const std::uint64_t two =
        (std::uint64_t{*reinterpret_cast<const unsigned*>(dynamic_shared(unit))} << layout.bits * steps |
         *reinterpret_cast<const unsigned*>(dynamic_shared(unit + 4))) >>
        layout.bits * (2 * steps - layout.memory - 4 - in_unit);
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

/// Whether the trellis is known and searched in integers; if so, finds the rows' codes, and overwrites y with their
/// values. All lanes of a warp call it, as search_known().
template <typename Team>
__device__ __forceinline__ bool search_if_known(Team team, const RowSegment& segment, const float* table,
                                                const SearchedRows& rows, int lane) {
  const int bits = segment.place.bits, memory = segment.memory;
  if (!segment.integers || !is_known_trellis(bits, memory)) return false;
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
