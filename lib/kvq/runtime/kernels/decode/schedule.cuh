#pragma once

#include <kvq/runtime/kernels/decode/params.h>

/// Who attends to what. Each (sequence, KV head) is an item; its tokens are cut into slots of about equal bytes, one
/// for each stage: first the coded tokens, then the exact ones. All slots of the batch lie on one line, sequence by
/// sequence, head by head, which is cut into equal pieces, one for each block. The cut depends on lengths that are read
/// on the device, so that a captured graph stays right while sequences grow. (Handing out the last third of the line to
/// who is done first was tried: the partial results that it adds cost more than the balance gains.)
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
  s.length = max(0, p.seq_lens[sequence]);
  s.first = p.sliding_window > 0 ? max(0, s.length - p.sliding_window) : 0;
  const int sinks = min(p.sink_tokens, s.length);
  s.coded_begin = max(sinks, s.first);
  s.recent_begin = max(s.coded_begin, s.length - p.recent_tokens);
  s.coded_end = s.recent_begin;
  s.coded_stage = s.coded_begin / T::kStageTokens;
  s.coded_slots =
      s.coded_begin < s.coded_end ? (s.coded_end + T::kStageTokens - 1) / T::kStageTokens - s.coded_stage : 0;
  s.sink_part = s.first / T::kExactTokens;
  s.sink_slots = s.first < sinks ? (sinks + T::kExactTokens - 1) / T::kExactTokens - s.sink_part : 0;
  s.recent_part = (s.recent_begin - p.sink_tokens) / T::kExactTokens;
  s.recent_slots = s.recent_begin < s.length ? (s.length - 1 - p.sink_tokens) / T::kExactTokens + 1 - s.recent_part : 0;
  s.slots = s.coded_slots + s.sink_slots + s.recent_slots;
  return s;
}

/// How the line is cut: into equal pieces of at least one slot.
struct Cut {
  long long total;  ///< slots
  int pieces;

  __device__ __forceinline__ Cut(long long line, int blocks)
      : total(line), pieces(static_cast<int>(min(static_cast<long long>(blocks), line))) {}
  /// First slot of a piece; `pieces` gives the end of the line.
  __device__ __forceinline__ long long begin_of(int piece) const { return total * piece / pieces; }
  /// The piece that holds a slot.
  __device__ __forceinline__ int piece_of(long long slot) const {
    return static_cast<int>(((slot + 1) * pieces - 1) / total);
  }
};

/// An item on the line.
struct Walk {
  long long slot;  ///< the item's first slot
  int sequence, head;
  Span span;
};

/// The next item that has slots. There must be one.
template <typename T>
__device__ __forceinline__ void next_item(const DecodeParams& p, Walk& w) {
  do {
    w.slot += w.span.slots;
    if (++w.head == p.num_kv_heads) {
      w.head = 0;
      w.span = span_of<T>(p, ++w.sequence);
    }
  } while (w.span.slots == 0);
}

/// Adds up the line and finds the sequence that holds the first slot of the block's own piece; by all threads, ends
/// with a barrier.
template <typename T>
__device__ __forceinline__ void survey(const DecodeParams& p, typename T::Shared& shared, int piece, int blocks) {
  const int thread = static_cast<int>(threadIdx.x);
  if (p.batch == 1) {
    if (thread == 0) {
      shared.total = static_cast<long long>(span_of<T>(p, 0).slots) * p.num_kv_heads;
      shared.first_sequence = 0, shared.first_slot = 0;
    }
    __syncthreads();
    return;
  }
  // Each thread adds a run of sequences, the first warp adds the runs.
  const int run = (p.batch + T::kThreads - 1) / T::kThreads;
  int sum = 0;
  for (int b = thread * run; b < min(p.batch, (thread + 1) * run); ++b) sum += span_of<T>(p, b).slots;
  if (thread < T::kThreads) shared.run_sum[thread] = sum;
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
    const Cut cut(total, blocks);
    const long long begin = piece < cut.pieces ? cut.begin_of(piece) : total;
    if (thread == 0) shared.total = total;
    // The lane whose sequences hold the slot walks them.
    if (begin < total && before * heads <= begin && begin < (before + mine) * heads) {
      int r = thread * kEach;
      while ((before + shared.run_sum[r]) * heads <= begin) before += shared.run_sum[r++];
      int b = r * run;
      if (run > 1)
        for (int slots = span_of<T>(p, b).slots; (before + slots) * heads <= begin; slots = span_of<T>(p, b).slots)
          before += slots, ++b;
      shared.first_sequence = b;
      shared.first_slot = before * heads;
    }
  }
  __syncthreads();
}

}  // namespace kvq::decode
