#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/schedule.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/sequences.cuh>

/// The chunk queue (schedule.h) as the kernels walk it. (Lengths and page tables are read past the L1 cache,
/// because not the decode kernel but the queries kernel before it has waited for the kernel that wrote them.)
namespace kvq::decode {

template <typename T>
struct StageTokens {
  static constexpr int coded = T::kStageTokens, exact = T::kExactTokens;
};
template <typename T>
__device__ __forceinline__ TileChunks chunks_of(const DecodeParams& p, const SequenceTokens& tokens) {
  return chunks_of(tokens, p.sliding_window, StageTokens<T>{});
}

/// Sums of chunks do not pass this number.
constexpr int kMostChunks = 0x7FFFFFFF;
__device__ __forceinline__ int add_chunks(int a, int b) { return a > kMostChunks - b ? kMostChunks : a + b; }

/// The chunk queue in the shared memory of a block; count_chunks() fills it.
template <int kThreads>
struct ChunkQueue {
  int chunks_before[kThreads + 1];  ///< chunks of one head before each run of sequences; last: of all runs
  SequenceTokens tokens[kThreads];  ///< of each sequence, if there are at most kThreads

  __device__ __forceinline__ SequenceTokens tokens_of(const DecodeParams& p, int sequence) const {
    return p.cache.batch <= kThreads ? tokens[sequence] : load_sequence(p.cache, sequence).tokens;
  }
  /// Chunks of all work tiles; 2^32 if there are as many or more.
  __device__ __forceinline__ std::uint64_t total(const DecodeParams& p) const {
    const int each = chunks_before[kThreads];
    return each == kMostChunks
               ? std::uint64_t{1} << 32
               : ptx::mul_wide(static_cast<unsigned>(each), static_cast<unsigned>(p.cache.num_kv_heads));
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
__device__ __forceinline__ void next_work_tile(const DecodeParams& p, const ChunkQueue<T::kConsumerThreads>& queue,
                                               WorkTile& tile) {
  do {
    tile.first_chunk += tile.chunks.count;
    if (++tile.head == p.cache.num_kv_heads) {
      tile.head = 0;
      tile.chunks = chunks_of<T>(p, queue.tokens_of(p, ++tile.sequence));
    }
  } while (tile.chunks.count == 0);
}

/// Fills `queue` by a prefix sum over the chunks of all sequences. All threads of the block call it; it ends with a
/// barrier. Each thread sums up a run of consecutive sequences, the first warp scans the runs.
template <typename T>
__device__ __forceinline__ void count_chunks(const DecodeParams& p, ChunkQueue<T::kConsumerThreads>& queue) {
  const int thread = static_cast<int>(threadIdx.x);
  int sum = 0;
  if (p.cache.batch <= T::kConsumerThreads) {
    if (thread < p.cache.batch) {
      const SequenceTokens tokens = load_sequence(p.cache, thread).tokens;
      queue.tokens[thread] = tokens;
      sum = chunks_of<T>(p, tokens).count;
    }
    if (p.cache.batch == 1) {
      if (thread == 0) queue.chunks_before[0] = 0, queue.chunks_before[T::kConsumerThreads] = sum;
      __syncthreads();
      return;
    }
  } else {
    const int run = (p.cache.batch + T::kConsumerThreads - 1) / T::kConsumerThreads;
    for (int b = thread * run; b < min(p.cache.batch, (thread + 1) * run); ++b)
      sum = add_chunks(sum, chunks_of<T>(p, load_sequence(p.cache, b).tokens).count);
  }
  if (thread < T::kConsumerThreads) queue.chunks_before[thread] = sum;
  __syncthreads();
  if (thread < 32) {
    constexpr int kEach = T::kConsumerThreads / 32;
    int mine[kEach], before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      mine[i] = queue.chunks_before[thread * kEach + i], before = add_chunks(before, mine[i]);
    const int own = before;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, before, step);
      if (thread >= step) before = add_chunks(before, other);
    }
    if (thread == 31) queue.chunks_before[T::kConsumerThreads] = before;
    before -= own;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      queue.chunks_before[thread * kEach + i] = before;
      before += mine[i];
    }
  }
  __syncthreads();
}

/// The work tile that contains chunk `chunk` of the queue; all lanes of one warp call it.
template <typename T>
__device__ __forceinline__ WorkTile find_work_tile(const DecodeParams& p, const ChunkQueue<T::kConsumerThreads>& queue,
                                                   unsigned chunk, int lane) {
  const auto heads = static_cast<unsigned>(p.cache.num_kv_heads);
  WorkTile tile;
  tile.sequence = 0, tile.first_chunk = 0;
  if (p.cache.batch > 1) {
    constexpr int kEach = T::kConsumerThreads / 32;
    int runs = 0;  // number of runs that begin at or before the chunk
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      runs += __popc(__ballot_sync(kAll, static_cast<unsigned>(queue.chunks_before[i * 32 + lane]) * heads <= chunk));
    // A run without chunks begins where the next run does, so the last run that begins there has the chunk.
    tile.sequence = (runs - 1) * ((p.cache.batch + T::kConsumerThreads - 1) / T::kConsumerThreads);
    tile.first_chunk = static_cast<unsigned>(queue.chunks_before[runs - 1]) * heads;
  }
  tile.chunks = chunks_of<T>(p, queue.tokens_of(p, tile.sequence));
  while (tile.first_chunk + static_cast<unsigned>(tile.chunks.count) * heads <= chunk) {
    tile.first_chunk += static_cast<unsigned>(tile.chunks.count) * heads;
    tile.chunks = chunks_of<T>(p, queue.tokens_of(p, ++tile.sequence));
  }
  const auto chunks = static_cast<unsigned>(tile.chunks.count), head = (chunk - tile.first_chunk) / chunks;
  tile.head = static_cast<int>(head), tile.first_chunk += head * chunks;
  return tile;
}

}  // namespace kvq::decode
