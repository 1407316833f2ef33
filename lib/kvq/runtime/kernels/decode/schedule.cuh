#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/device/ptx.cuh>

/// Which block attends to which tokens: stream-K. Each (sequence, KV head) is a work tile. Its tokens are cut into KV
/// chunks of about equal bytes, one for each stage: first the quantized tokens, then the exact (bfloat16) ones. The
/// chunks of all work tiles lie end to end in one queue, sequence by sequence, head by head. The queue is cut into
/// equal splits, one for each block. Where it is cut depends on lengths that are read on the device, so that a captured
/// graph stays right while sequences grow. Equal splits do not take equal times: the oldest block of a multiprocessor
/// is served first, and some multiprocessors are nearer to memory. So on a long queue the equal splits leave a rest,
/// which blocks claim in ever smaller splits from an atomic work counter as they finish. (More than a few such splits
/// cost more than they gain: each is one more work tile to begin and to end.) On a short queue, blocks that would start
/// late stay idle (launch.cuh).
namespace kvq::decode {

/// KV chunks of one work tile; equal for all heads of a sequence. (Lengths and page tables are read past the L1 cache,
/// because not this kernel but the queries kernel before it has waited for the kernel that wrote them.)
struct TileChunks {
  int length;                                           ///< tokens
  int first;                                            ///< first visible position
  int coded_begin, coded_end;                           ///< positions
  int first_coded_chunk, coded_chunks;                  ///< number of the first one, how many
  int first_sink_chunk, sink_chunks;                    ///< likewise, of eight exact tokens each
  int recent_begin, first_recent_chunk, recent_chunks;  ///< position; likewise, counted from the end of the sinks
  int count;                                            ///< of all kinds
};

template <typename T>
__device__ __forceinline__ TileChunks chunks_of(const DecodeParams& p, int length) {
  TileChunks c;
  c.length = max(0, length);
  c.first = p.sliding_window > 0 ? max(0, c.length - p.sliding_window) : 0;
  const int sinks = min(p.sink_tokens, c.length);
  c.coded_begin = max(sinks, c.first);
  c.recent_begin = max(c.coded_begin, c.length - p.recent_tokens);
  c.coded_end = c.recent_begin;
  c.first_coded_chunk = c.coded_begin / T::kStageTokens;
  c.coded_chunks =
      c.coded_begin < c.coded_end ? (c.coded_end + T::kStageTokens - 1) / T::kStageTokens - c.first_coded_chunk : 0;
  c.first_sink_chunk = c.first / T::kExactTokens;
  c.sink_chunks = c.first < sinks ? (sinks + T::kExactTokens - 1) / T::kExactTokens - c.first_sink_chunk : 0;
  c.first_recent_chunk = (c.recent_begin - p.sink_tokens) / T::kExactTokens;
  c.recent_chunks =
      c.recent_begin < c.length ? (c.length - 1 - p.sink_tokens) / T::kExactTokens + 1 - c.first_recent_chunk : 0;
  c.count = c.coded_chunks + c.sink_chunks + c.recent_chunks;
  return c;
}

/// How the queue is cut into splits. In round 0 each block has the split of its own number; the splits of the later
/// rounds, as many in each round, are claimed from the work counter.
struct Splits {
  static constexpr int kRounds = 4;  ///< at most
  /// Chunks a block from which on the queue has three rounds, or four: shorter last splits would not be worth their
  /// partial results.
  static constexpr int kLongShare = 128, kVeryLongShare = 1024;

  unsigned chunks;  ///< of the queue
  int rounds;
  int per_round;  ///< splits of a round

  /// Traps if the queue has 2^32 chunks or more: 10 TB of tokens, where shared pages count once for each sequence.
  /// @param one_round_splits  number of splits of a queue of one round
  __device__ __forceinline__ Splits(unsigned long long queue, int blocks, int one_round_splits)
      : chunks(static_cast<unsigned>(queue)),
        rounds(chunks < static_cast<unsigned>(kLongShare * blocks)       ? 1
               : chunks < static_cast<unsigned>(kVeryLongShare * blocks) ? 3
                                                                         : 4) {
    if (queue >> 32) __trap();
    per_round = static_cast<int>(min(static_cast<unsigned>(rounds == 1 ? one_round_splits : blocks), chunks));
  }
  __device__ __forceinline__ int count() const { return rounds * per_round; }
  /// First chunk of a round.
  __device__ __forceinline__ unsigned round_begin(int round) const {
    constexpr int kEnds[kRounds - 1] = {56, 61, 63};  // in 1/64 of the queue
    if (round == 0) return 0;
    if (round == rounds) return chunks;
    int end = kEnds[0];
#pragma unroll
    for (int r = 1; r < kRounds - 1; ++r)
      if (round > r) end = kEnds[r];
    return static_cast<unsigned>(ptx::mul_wide(chunks, static_cast<unsigned>(end)) >> 6);
  }
  /// First chunk of a split, and the one behind its last.
  struct Range {
    unsigned begin, end;
  };
  __device__ __forceinline__ Range range_of(int split) const {
    int round = 0;
#pragma unroll
    for (int r = 1; r < kRounds; ++r)
      if (split >= r * per_round) round = r;
    const unsigned begin = round_begin(round), size = round_begin(round + 1) - begin;
    const auto in_round = static_cast<unsigned>(split - round * per_round);
    const auto begin_of = [&](unsigned i) {
      return begin + static_cast<unsigned>(ptx::mul_wide(size, i) / static_cast<unsigned>(per_round));
    };
    return {begin_of(in_round), begin_of(in_round + 1)};
  }
};

/// Which partial result: the one that a split gives for a work tile. At most two work tiles of a split lie in other
/// splits as well: the one that the split begins in, and the one that it ends in; they use the two shared entries that
/// the split has among the partial results. A work tile that is whole in one split has an entry of its own.
struct PartialId {
  int work_tile;  ///< sequence * num_kv_heads + head
  int split;
  bool begins, ends;  ///< the split has the work tile's first chunk, its last one
};
__device__ __forceinline__ long long shared_partial(int split, bool begins) { return 2LL * split + begins; }
__device__ __forceinline__ long long whole_partial(int blocks, int work_tile) {
  return 2LL * Splits::kRounds * blocks + work_tile;
}
__device__ __forceinline__ long long partial_index(int blocks, const PartialId& id) {
  return id.begins && id.ends ? whole_partial(blocks, id.work_tile) : shared_partial(id.split, id.begins);
}

/// Completion counter of a work tile: one word, to which each stored partial result adds increment(id).
///
///   | 63..40: split behind the last - first split, modulo 2^24 | 39..20: first split | 19..0: stored partial results |
///
/// The first partial result of a work tile adds the first split, the last one adds the split behind. So the work tile
/// is complete when the difference equals the number of stored partial results.
struct CompletionCounter {
  static constexpr int kMost = (1 << 20) - 1;              ///< of partial results, and of splits
  static constexpr unsigned long long kNone = 1ull << 20;  ///< a work tile without tokens, which no block attends to
  unsigned long long bits = 0;
  static __device__ __forceinline__ unsigned long long increment(const PartialId& id) {
    const unsigned long long first = id.begins ? id.split : 0, end = id.ends ? id.split + 1 : 0;
    return 1ull + (first << 20) + ((end - first) << 40);
  }
  __device__ __forceinline__ int first_split() const { return static_cast<int>(bits >> 20 & 0xFFFFF); }
  /// Of a complete work tile.
  __device__ __forceinline__ int partials() const { return static_cast<int>(bits >> 40); }
  __device__ __forceinline__ bool complete() const {
    return bits == kNone || ((bits & 0xFFFFF) != 0 && (bits & 0xFFFFF) == bits >> 40);
  }
};

/// The queue in the shared memory of a block; count_chunks() fills it.
template <int kThreads>
struct ChunkQueue {
  int chunks_before[kThreads + 1];  ///< chunks of one head before each run of sequences, and of all
  int lengths[kThreads];            ///< of each sequence, if there are at most kThreads

  __device__ __forceinline__ int length(const DecodeParams& p, int sequence) const {
    return p.batch <= kThreads ? lengths[sequence] : __ldcg(p.seq_lens + sequence);
  }
};

/// A work tile in the queue.
struct WorkTile {
  unsigned first_chunk;  ///< in the queue
  int sequence, head;
  TileChunks chunks;
};

/// Moves to the next work tile that has chunks. There must be one.
template <typename T>
__device__ __forceinline__ void next_work_tile(const DecodeParams& p, const ChunkQueue<T::kThreads>& queue,
                                               WorkTile& tile) {
  do {
    tile.first_chunk += tile.chunks.count;
    if (++tile.head == p.num_kv_heads) {
      tile.head = 0;
      tile.chunks = chunks_of<T>(p, queue.length(p, ++tile.sequence));
    }
  } while (tile.chunks.count == 0);
}

/// Fills `queue` by a prefix sum over the chunks of all sequences. All threads of the block call it; it ends with a
/// barrier. Each thread sums up a run of consecutive sequences, the first warp scans the runs.
template <typename T>
__device__ __forceinline__ void count_chunks(const DecodeParams& p, ChunkQueue<T::kThreads>& queue) {
  const int thread = static_cast<int>(threadIdx.x);
  int sum = 0;
  if (p.batch <= T::kThreads) {
    if (thread < p.batch) {
      const int length = __ldcg(p.seq_lens + thread);
      queue.lengths[thread] = length;
      sum = chunks_of<T>(p, length).count;
    }
    if (p.batch == 1) {
      if (thread == 0) queue.chunks_before[0] = 0, queue.chunks_before[T::kThreads] = sum;
      __syncthreads();
      return;
    }
  } else {
    const int run = (p.batch + T::kThreads - 1) / T::kThreads;
    for (int b = thread * run; b < min(p.batch, (thread + 1) * run); ++b)
      sum += chunks_of<T>(p, __ldcg(p.seq_lens + b)).count;
  }
  if (thread < T::kThreads) queue.chunks_before[thread] = sum;
  __syncthreads();
  if (thread < 32) {
    constexpr int kEach = T::kThreads / 32;
    int mine[kEach], before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine[i] = queue.chunks_before[thread * kEach + i], before += mine[i];
    const int own = before;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (thread >= step) before += other;
    }
    before -= own;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      queue.chunks_before[thread * kEach + i] = before;
      before += mine[i];
    }
    if (thread == 31) queue.chunks_before[T::kThreads] = before;
  }
  __syncthreads();
}

/// The work tile that has a chunk of the queue; all lanes of one warp call it.
template <typename T>
__device__ __forceinline__ WorkTile find_work_tile(const DecodeParams& p, const ChunkQueue<T::kThreads>& queue,
                                                   unsigned chunk, int lane) {
  const auto heads = static_cast<unsigned>(p.num_kv_heads);
  WorkTile tile;
  tile.sequence = 0, tile.first_chunk = 0;
  if (p.batch > 1) {
    constexpr int kEach = T::kThreads / 32;
    int runs = 0;  // number of runs that begin at or before the chunk
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      runs += __popc(__ballot_sync(~0u, static_cast<unsigned>(queue.chunks_before[i * 32 + lane]) * heads <= chunk));
    // A run without chunks begins where the next run does, so the last run that begins there has the chunk.
    tile.sequence = (runs - 1) * ((p.batch + T::kThreads - 1) / T::kThreads);
    tile.first_chunk = static_cast<unsigned>(queue.chunks_before[runs - 1]) * heads;
  }
  tile.chunks = chunks_of<T>(p, queue.length(p, tile.sequence));
  while (tile.first_chunk + static_cast<unsigned>(tile.chunks.count) * heads <= chunk) {
    tile.first_chunk += static_cast<unsigned>(tile.chunks.count) * heads;
    tile.chunks = chunks_of<T>(p, queue.length(p, ++tile.sequence));
  }
  const auto chunks = static_cast<unsigned>(tile.chunks.count), head = (chunk - tile.first_chunk) / chunks;
  tile.head = static_cast<int>(head), tile.first_chunk += head * chunks;
  return tile;
}

}  // namespace kvq::decode
