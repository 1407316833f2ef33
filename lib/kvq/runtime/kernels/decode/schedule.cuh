#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/ptx.cuh>

/// Which block attends to which tokens: stream-K. Each (sequence, KV head) is an item (work tile); its tokens are cut
/// into slots (KV chunks) of about equal bytes, one for each stage: first the quantized tokens, then the exact
/// (bfloat16) ones. The slots of all items lie end to end on one line (the work queue), sequence by sequence, head by
/// head. The line is cut into equal pieces (splits), one for each block. The cut depends on lengths that are read on
/// the device, so that a captured graph stays right while sequences grow. Equal pieces do not take equal times: the
/// oldest block of a multiprocessor is served first, and some multiprocessors are nearer to memory. So on a long line
/// the equal pieces leave a rest, which blocks claim in ever smaller pieces from an atomic work counter as they finish.
/// (More than a few such pieces cost more than they gain: each is one more item to begin and to end.) On a short line,
/// blocks that would start late stay idle (launch.cuh).
namespace kvq::decode {

/// Slots of one item; equal for all heads of a sequence. (Lengths and page tables are read past the L1 cache, because
/// not this kernel but the queries kernel before it has waited for the kernel that wrote them.)
struct Span {
  int length;                                   ///< tokens
  int first;                                    ///< first visible position
  int coded_begin, coded_end;                   ///< positions
  int coded_stage, coded_slots;                 ///< first stage, number of stages
  int sink_part, sink_slots;                    ///< first block of eight exact tokens, number of blocks
  int recent_begin, recent_part, recent_slots;  ///< first position; as above, counted from the end of the sinks
  int slots;                                    ///< of all kinds
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

/// How the line is cut. In round 0 each block has the piece of its own number; the pieces of the later rounds, as many
/// in each round, are claimed from the work counter.
struct Cut {
  static constexpr int kRounds = 4;  ///< at most
  /// Slots a block from which on the line has three rounds, or four: shorter last pieces would not be worth their
  /// partial results.
  static constexpr int kLongShare = 128, kVeryLongShare = 1024;

  unsigned total;  ///< slots
  int rounds;
  int each;  ///< pieces of a round

  /// Traps if the line has 2^32 slots or more: 10 TB of tokens, where shared pages count once for each sequence.
  /// @param short_blocks  number of pieces of a line of one round
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
    constexpr int kEnds[kRounds - 1] = {56, 61, 63};  // in 1/64 of the line
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

/// The part of an item that lies in one piece. It gives one partial result, which is stored in one record. At most two
/// items of a piece lie in other pieces as well: the one that the piece begins in, and the one that it ends in; they
/// use the piece's two shared records. An item that is whole in one piece has a record of its own.
struct Part {
  int item;  ///< sequence * num_kv_heads + head
  int piece;
  bool begins, ends;  ///< this part has the item's first slot, its last one
};
__device__ __forceinline__ long long shared_record(int piece, bool begins) { return 2LL * piece + begins; }
__device__ __forceinline__ long long whole_record(int blocks, int item) { return 2LL * Cut::kRounds * blocks + item; }
__device__ __forceinline__ long long record_of(int blocks, const Part& part) {
  return part.begins && part.ends ? whole_record(blocks, part.item) : shared_record(part.piece, part.begins);
}

/// Completion counter of an item: one word, to which each stored part adds of(part).
///
///   | 63..40: piece behind the item's last - first piece, modulo 2^24 | 39..20: first piece | 19..0: stored parts |
///
/// The item's first part adds the first piece, its last part the piece behind. So the item is complete when the
/// difference equals the number of stored parts.
struct Arrivals {
  static constexpr int kMost = (1 << 20) - 1;              ///< of parts, and of pieces
  static constexpr unsigned long long kNone = 1ull << 20;  ///< an item without tokens, which no block attends to
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

/// The line in the shared memory of a block; survey() fills it.
template <int kThreads>
struct Line {
  int runs_before[kThreads + 1];  ///< slots of one head before each run of sequences, and of all
  int lengths[kThreads];          ///< of each sequence, if there are at most kThreads

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

/// Moves to the next item that has slots. There must be one.
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

/// Fills `line` by a prefix sum over the slots of all sequences. All threads of the block call it; it ends with a
/// barrier. Each thread sums up a run of consecutive sequences, the first warp scans the runs.
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

/// The item that holds a slot of the line; all lanes of one warp call it.
template <typename T>
__device__ __forceinline__ Walk find_item(const DecodeParams& p, const Line<T::kThreads>& line, unsigned slot,
                                          int lane) {
  const auto heads = static_cast<unsigned>(p.num_kv_heads);
  Walk walk;
  walk.sequence = 0, walk.slot = 0;
  if (p.batch > 1) {
    constexpr int kEach = T::kThreads / 32;
    int runs = 0;  // number of runs that begin at or before the slot
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      runs += __popc(__ballot_sync(~0u, static_cast<unsigned>(line.runs_before[i * 32 + lane]) * heads <= slot));
    // A run without slots begins where the next run does, so the last run that begins there has the slot.
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
