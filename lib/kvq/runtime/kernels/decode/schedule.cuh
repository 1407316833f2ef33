#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/ptx.cuh>

/// Who attends to what. Each (sequence, KV head) is an item; its tokens are cut into slots of about equal bytes, one
/// for each stage: first the coded tokens, then the exact ones. All slots of the batch lie on one line, sequence by
/// sequence, head by head, which is cut into equal pieces, one for each block. The cut depends on lengths that are read
/// on the device, so that a captured graph stays right while sequences grow. Equal pieces do not take equal times: the
/// oldest block of a multiprocessor is served first, and some multiprocessors are nearer to memory. So on a long line
/// the equal pieces leave a rest, which is handed out in ever smaller pieces to who is done first. (More than a few of
/// them cost more than they gain: each is one more item to begin and to end.) On a short line blocks that would come up
/// late stay idle (launch.cuh).
namespace kvq::decode {

/// Slots of one item; equal for all heads of a sequence. (Lengths and tables are read past the L1 cache: the kernel
/// before, not this one, has waited for who wrote them.)
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
__device__ __forceinline__ Span span_of(const DecodeParams& p, int length) {
  Span s;
  s.length = max(0, length);
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

/// How the line is cut. Round 0 gives each block one piece; the pieces of the later rounds, as many each, are handed
/// out.
struct Cut {
  static constexpr int kRounds = 4;  ///< at most
  /// Slots of a block from which on the line has three rounds, or four: what it takes for the last pieces to be worth
  /// their partial results.
  static constexpr int kLongShare = 128, kVeryLongShare = 1024;

  unsigned total;  ///< slots
  int rounds;
  int each;  ///< pieces of a round

  /// Traps if the line has 2^32 slots or more: 10 TB of tokens, pages that sequences share counted anew.
  /// @param short_blocks  that a line of one round is cut for
  __device__ __forceinline__ Cut(unsigned long long line, int blocks, int short_blocks)
      : total(static_cast<unsigned>(line)),
        rounds(total < static_cast<unsigned>(kLongShare * blocks)       ? 1
               : total < static_cast<unsigned>(kVeryLongShare * blocks) ? 3
                                                                        : 4) {
    if (line >> 32) __trap();
    each = static_cast<int>(min(static_cast<unsigned>(rounds == 1 ? short_blocks : blocks), total));
  }
  __device__ __forceinline__ int pieces() const { return rounds * each; }
  /// First slot of a round.
  __device__ __forceinline__ unsigned round_begin(int round) const {
    constexpr int kEnds[kRounds - 1] = {56, 61, 63};  // in parts of 64 of the line
    if (round == 0) return 0;
    if (round == rounds) return total;
    int end = kEnds[0];
#pragma unroll
    for (int r = 1; r < kRounds - 1; ++r)
      if (round > r) end = kEnds[r];
    return static_cast<unsigned>(ptx::mul_wide(total, static_cast<unsigned>(end)) >> 6);
  }
  /// First slot of a piece, and the one behind its last.
  struct Range {
    unsigned begin, end;
  };
  __device__ __forceinline__ Range range_of(int piece) const {
    int round = 0;
#pragma unroll
    for (int r = 1; r < kRounds; ++r)
      if (piece >= r * each) round = r;
    const unsigned begin = round_begin(round), size = round_begin(round + 1) - begin;
    const auto at = static_cast<unsigned>(piece - round * each);
    const auto part = [&](unsigned i) {
      return begin + static_cast<unsigned>(ptx::mul_wide(size, i) / static_cast<unsigned>(each));
    };
    return {part(at), part(at + 1)};
  }
};

/// A piece's part of an item. It leaves one partial result, a record: a piece shares at most two items, the one it
/// begins in and one that begins in it and does not end there; an item that is whole in one piece has a record of its
/// own.
struct Part {
  int item;  ///< sequence * num_kv_heads + head
  int piece;
  bool begins, ends;  ///< the item
};
__device__ __forceinline__ long long shared_record(int piece, bool begins) { return 2LL * piece + begins; }
__device__ __forceinline__ long long whole_record(int blocks, int item) { return 2LL * Cut::kRounds * blocks + item; }
__device__ __forceinline__ long long record_of(int blocks, const Part& part) {
  return part.begins && part.ends ? whole_record(blocks, part.item) : shared_record(part.piece, part.begins);
}

/// What has been left of an item, in one word that parts add to: their number, the piece that begins the item, and, in
/// the uppermost bits, modulo 2^24, the number of the piece behind its end less that of the first. So the item is
/// complete when that difference is the number of parts.
struct Arrivals {
  static constexpr int kMost = (1 << 20) - 1;              ///< of parts, and of pieces
  static constexpr unsigned long long kNone = 1ull << 20;  ///< an item without tokens, which nobody attends to
  unsigned long long bits = 0;
  static __device__ __forceinline__ unsigned long long of(const Part& part) {
    const unsigned long long first = part.begins ? part.piece : 0, end = part.ends ? part.piece + 1 : 0;
    return 1ull + (first << 20) + ((end - first) << 40);
  }
  __device__ __forceinline__ int first_piece() const { return static_cast<int>(bits >> 20 & 0xFFFFF); }
  __device__ __forceinline__ int parts() const { return static_cast<int>(bits >> 40); }
  __device__ __forceinline__ bool complete() const {
    return bits == kNone || ((bits & 0xFFFFF) != 0 && (bits & 0xFFFFF) == bits >> 40);
  }
};

/// What a block knows of the line once it has added it up.
template <int kThreads>
struct Line {
  int runs_before[kThreads + 1];  ///< slots of one head before each run of sequences, and of all
  int lengths[kThreads];          ///< of the sequences, if they are no more

  __device__ __forceinline__ int length(const DecodeParams& p, int sequence) const {
    return p.batch <= kThreads ? lengths[sequence] : __ldcg(p.seq_lens + sequence);
  }
};

/// An item on the line.
struct Walk {
  unsigned slot;  ///< the item's first slot
  int sequence, head;
  Span span;
};

/// The next item that has slots. There must be one.
template <typename T>
__device__ __forceinline__ void next_item(const DecodeParams& p, const Line<T::kThreads>& line, Walk& w) {
  do {
    w.slot += w.span.slots;
    if (++w.head == p.num_kv_heads) {
      w.head = 0;
      w.span = span_of<T>(p, line.length(p, ++w.sequence));
    }
  } while (w.span.slots == 0);
}

/// Adds up the line; by all threads, ends with a barrier. Each thread adds a run of sequences, the first warp adds the
/// runs.
template <typename T>
__device__ __forceinline__ void survey(const DecodeParams& p, Line<T::kThreads>& line) {
  const int thread = static_cast<int>(threadIdx.x);
  int sum = 0;
  if (p.batch <= T::kThreads) {
    if (thread < p.batch) {
      const int length = __ldcg(p.seq_lens + thread);
      line.lengths[thread] = length;
      sum = span_of<T>(p, length).slots;
    }
    if (p.batch == 1) {
      if (thread == 0) line.runs_before[0] = 0, line.runs_before[T::kThreads] = sum;
      __syncthreads();
      return;
    }
  } else {
    const int run = (p.batch + T::kThreads - 1) / T::kThreads;
    for (int b = thread * run; b < min(p.batch, (thread + 1) * run); ++b)
      sum += span_of<T>(p, __ldcg(p.seq_lens + b)).slots;
  }
  if (thread < T::kThreads) line.runs_before[thread] = sum;
  __syncthreads();
  if (thread < 32) {
    constexpr int kEach = T::kThreads / 32;
    int mine[kEach], before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine[i] = line.runs_before[thread * kEach + i], before += mine[i];
    const int own = before;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (thread >= step) before += other;
    }
    before -= own;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      line.runs_before[thread * kEach + i] = before;
      before += mine[i];
    }
    if (thread == 31) line.runs_before[T::kThreads] = before;
  }
  __syncthreads();
}

/// The item that holds a slot of the line; by one warp.
template <typename T>
__device__ __forceinline__ Walk find_item(const DecodeParams& p, const Line<T::kThreads>& line, unsigned slot,
                                          int lane) {
  const auto heads = static_cast<unsigned>(p.num_kv_heads);
  Walk walk;
  walk.sequence = 0, walk.slot = 0;
  if (p.batch > 1) {
    constexpr int kEach = T::kThreads / 32;
    int runs = 0;  // that begin at or before the slot
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      runs += __popc(__ballot_sync(~0u, static_cast<unsigned>(line.runs_before[i * 32 + lane]) * heads <= slot));
    // Runs without slots begin where the next one does; the last of them is the one that has some.
    walk.sequence = (runs - 1) * ((p.batch + T::kThreads - 1) / T::kThreads);
    walk.slot = static_cast<unsigned>(line.runs_before[runs - 1]) * heads;
  }
  walk.span = span_of<T>(p, line.length(p, walk.sequence));
  while (walk.slot + static_cast<unsigned>(walk.span.slots) * heads <= slot) {
    walk.slot += static_cast<unsigned>(walk.span.slots) * heads;
    walk.span = span_of<T>(p, line.length(p, ++walk.sequence));
  }
  const auto slots = static_cast<unsigned>(walk.span.slots), head = (slot - walk.slot) / slots;
  walk.head = static_cast<int>(head), walk.slot += head * slots;
  return walk;
}

}  // namespace kvq::decode
