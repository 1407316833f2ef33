#pragma once

#include <kvq/runtime/kernels/decode/params.h>

/// Who attends to what. Each (sequence, KV head) is an item; its tokens are cut into slots of about equal bytes, one for each stage:
/// first the coded tokens, then the exact ones. All slots of the batch lie on one line, sequence by sequence, head by head, and each
/// block (or cluster of blocks) takes an equal piece of it, at least one slot. The cut depends on lengths that are read on the device,
/// so that a captured graph stays right while sequences grow.
namespace kvq::decode {

/// Slots of one item; equal for all heads of a sequence.
struct Span {
  int length;                                   ///< tokens
  int first;                                    ///< first visible position
  int coded_begin, coded_end;                   ///< positions
  int coded_stage, coded_slots;                 ///< first stage, number of stages
  int sink_part, sink_slots;                    ///< parts of eight tokens
  int recent_begin, recent_part, recent_slots;  ///< parts counted from the end of the sinks, around the ring
  int slots;
};

template <typename T>
__device__ __forceinline__ Span span_of(const DecodeParams& p, int sequence) {
  Span s;
  s.length = p.seq_lens[sequence];
  s.first = p.sliding_window > 0 ? max(0, s.length - p.sliding_window) : 0;
  const int sinks = min(p.sink_tokens, s.length);
  s.coded_begin = max(sinks, s.first);
  s.recent_begin = max(s.coded_begin, s.length - p.recent_tokens);
  s.coded_end = s.recent_begin;
  s.coded_stage = s.coded_begin / T::kStageTokens;
  s.coded_slots = s.coded_begin < s.coded_end ? (s.coded_end + T::kStageTokens - 1) / T::kStageTokens - s.coded_stage : 0;
  s.sink_part = s.first / T::kExactTokens;
  s.sink_slots = s.first < sinks ? (sinks + T::kExactTokens - 1) / T::kExactTokens - s.sink_part : 0;
  s.recent_part = (s.recent_begin - p.sink_tokens) / T::kExactTokens;
  s.recent_slots = s.recent_begin < s.length ? (s.length - 1 - p.sink_tokens) / T::kExactTokens + 1 - s.recent_part : 0;
  s.slots = s.coded_slots + s.sink_slots + s.recent_slots;
  return s;
}

/// Where one team is on the line.
struct Walk {
  long long item_slot;  ///< the item's first slot
  int sequence, head;
  int slot, end;        ///< the team's part of this item
  Span span;
};

/// Cuts the piece's part of the walk's item among the teams.
__device__ __forceinline__ void take_part(Walk& w, long long begin, long long end, int team, int teams) {
  const long long n = w.span.slots;
  const int low = static_cast<int>(min(max(begin - w.item_slot, 0LL), n)), high = static_cast<int>(min(max(end - w.item_slot, 0LL), n));
  w.slot = low + (high - low) * team / teams;
  w.end = low + (high - low) * (team + 1) / teams;
}

/// Next item of the piece that has slots.
/// @return  false if there is none
template <typename T>
__device__ __forceinline__ bool next_item(const DecodeParams& p, Walk& w, long long begin, long long end, int team, int teams) {
  do {
    w.item_slot += w.span.slots;
    if (w.item_slot >= end) return false;
    if (++w.head == p.num_kv_heads) {
      w.head = 0;
      if (++w.sequence == p.batch) return false;
      w.span = span_of<T>(p, w.sequence);
    }
  } while (w.span.slots == 0);
  take_part(w, begin, end, team, teams);
  return true;
}

/// Finds the piece of the line and where it starts; by all threads, ends with a barrier.
template <typename T>
__device__ __forceinline__ void find_piece(const DecodeParams& p, typename T::Shared& shared, int piece_index, int piece_count) {
  const int thread = static_cast<int>(threadIdx.x);
  if (p.batch == 1) {
    if (thread == 0) {
      const long long total = static_cast<long long>(span_of<T>(p, 0).slots) * p.num_kv_heads;
      shared.total = total;
      shared.pieces = min(static_cast<long long>(piece_count), total);
      shared.first_sequence = 0, shared.first_slot = 0;
    }
    __syncthreads();
  } else {
    // Each thread adds a run of sequences, the first warp adds the runs.
    const int run = (p.batch + T::kThreads - 1) / T::kThreads;
    int sum = 0;
    for (int b = thread * run; b < min(p.batch, (thread + 1) * run); ++b) sum += span_of<T>(p, b).slots;
    shared.run_sum[thread] = sum;
    __syncthreads();
    if (thread < 32) {
      constexpr int kEach = T::kThreads / 32;
      long long mine = 0;
      for (int i = 0; i < kEach; ++i) mine += shared.run_sum[thread * kEach + i];
      long long before = mine;
      for (int step = 1; step < 32; step *= 2) {
        const long long other = __shfl_up_sync(~0u, before, step);
        if (thread >= step) before += other;
      }
      const long long heads = p.num_kv_heads, total = __shfl_sync(~0u, before, 31) * heads;
      before -= mine;
      const long long pieces = min(static_cast<long long>(piece_count), total);
      const long long begin = piece_index < pieces ? total * piece_index / pieces : total;
      if (thread == 0) shared.total = total, shared.pieces = pieces;
      // The lane whose sequences hold slot `begin` walks them.
      if (begin < total && before * heads <= begin && begin < (before + mine) * heads) {
        int b = thread * kEach * run;
        for (int slots = span_of<T>(p, b).slots; (before + slots) * heads <= begin; slots = span_of<T>(p, b).slots) before += slots, ++b;
        shared.first_sequence = b;
        shared.first_slot = before * heads;
      }
    }
    __syncthreads();
  }
}

}  // namespace kvq::decode
