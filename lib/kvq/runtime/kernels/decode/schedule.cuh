#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/schedule.h>
#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/common/constants.cuh>
#include <kvq/runtime/kernels/common/sequences.cuh>
#include <kvq/runtime/kernels/decode/passes.cuh>

/// The chunk queue (schedule.h) as the kernels walk it. (Lengths and page tables are read past the L1 cache,
/// because not the decode kernel but the queries kernel before it has waited for the kernel that wrote them.)
namespace kvq::decode {

template <typename T>
struct StageTokens {
  static constexpr int coded = T::kStageTokens, exact = T::kExactTokens;
};
/// @param pass    number among all passes
/// @param tokens  of its sequence
template <typename T>
__device__ __forceinline__ TileChunks chunks_of(const DecodeKernelParams& p, int pass, const SequenceTokens& tokens) {
  return chunks_of(tokens, seen_by_pass(p, pass, tokens.length), StageTokens<T>{});
}

/// Sums of chunks do not pass this number.
constexpr int kMostChunks = 0x7FFFFFFF;
__device__ __forceinline__ int add_chunks(int a, int b) { return a > kMostChunks - b ? kMostChunks : a + b; }

/// The chunk queue in the shared memory of a block; count_chunks() fills it.
template <int kThreads>
struct ChunkQueue {
  int chunks_before[kThreads + 1];  ///< chunks of one head before each run of passes; last: of all runs
  SequenceTokens tokens[kThreads];  ///< of each pass's sequence, if there are at most kThreads passes

  __device__ __forceinline__ SequenceTokens tokens_of(const DecodeKernelParams& p, int pass) const {
    return p.num_passes() <= kThreads ? tokens[pass] : load_pass(p, pass).checked.tokens;
  }
  /// Chunks of all work tiles; 2^32 if there are as many or more.
  __device__ __forceinline__ std::uint64_t total(const DecodeKernelParams& p) const {
    const int each = chunks_before[kThreads];
    return each == kMostChunks
               ? std::uint64_t{1} << 32
               : ptx::mul_wide(static_cast<unsigned>(each), static_cast<unsigned>(p.cache.num_kv_heads));
  }
};

/// A work tile in the queue.
struct WorkTile {
  unsigned first_chunk;  ///< in the queue
  int pass, head;
  TileChunks chunks;
};

/// Moves to the next work tile that has chunks. There must be one.
template <typename T>
__device__ __forceinline__ void next_work_tile(const DecodeKernelParams& p,
                                               const ChunkQueue<T::kConsumerThreads>& queue, WorkTile& tile) {
  do {
    tile.first_chunk += tile.chunks.count;
    if (++tile.head == p.cache.num_kv_heads) {
      tile.head = 0;
      ++tile.pass;
      tile.chunks = chunks_of<T>(p, tile.pass, queue.tokens_of(p, tile.pass));
    }
  } while (tile.chunks.count == 0);
}

/// Fills `queue` by a prefix sum over the chunks of all passes, of which there are several. All threads of the block
/// call it; it ends with a barrier. Each thread sums up a run of consecutive passes, the first warp scans the runs.
template <typename T>
__device__ __forceinline__ void count_chunks(const DecodeKernelParams& p, ChunkQueue<T::kConsumerThreads>& queue) {
  const int thread = static_cast<int>(threadIdx.x);
  const int passes = p.num_passes();
  int sum = 0;
  if (passes <= T::kConsumerThreads) {
    if (thread < passes) {
      const SequenceTokens tokens = load_pass(p, thread).checked.tokens;
      queue.tokens[thread] = tokens;
      sum = chunks_of<T>(p, thread, tokens).count;
    }
  } else {
    const int run = (passes + T::kConsumerThreads - 1) / T::kConsumerThreads;
    for (int pass = thread * run; pass < min(passes, (thread + 1) * run); ++pass)
      sum = add_chunks(sum, chunks_of<T>(p, pass, load_pass(p, pass).checked.tokens).count);
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

/// The work tile of several passes that contains chunk `chunk` of the queue; all lanes of one warp call it.
template <typename T>
__device__ __forceinline__ WorkTile find_work_tile(const DecodeKernelParams& p,
                                                   const ChunkQueue<T::kConsumerThreads>& queue, unsigned chunk,
                                                   int lane) {
  const auto heads = static_cast<unsigned>(p.cache.num_kv_heads);
  constexpr int kEach = T::kConsumerThreads / 32;
  int runs = 0;  // number of runs that begin at or before the chunk
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    runs += __popc(__ballot_sync(kAll, static_cast<unsigned>(queue.chunks_before[i * 32 + lane]) * heads <= chunk));
  // A run without chunks begins where the next run does, so the last run that begins there has the chunk.
  WorkTile tile;
  tile.pass = (runs - 1) * ((p.num_passes() + T::kConsumerThreads - 1) / T::kConsumerThreads);
  tile.first_chunk = static_cast<unsigned>(queue.chunks_before[runs - 1]) * heads;
  tile.chunks = chunks_of<T>(p, tile.pass, queue.tokens_of(p, tile.pass));
  while (tile.first_chunk + static_cast<unsigned>(tile.chunks.count) * heads <= chunk) {
    tile.first_chunk += static_cast<unsigned>(tile.chunks.count) * heads;
    ++tile.pass;
    tile.chunks = chunks_of<T>(p, tile.pass, queue.tokens_of(p, tile.pass));
  }
  const auto chunks = static_cast<unsigned>(tile.chunks.count), head = (chunk - tile.first_chunk) / chunks;
  tile.head = static_cast<int>(head), tile.first_chunk += head * chunks;
  return tile;
}

/// Likewise of a single pass.
__device__ __forceinline__ WorkTile find_work_tile(const TileChunks& chunks, unsigned chunk) {
  const auto count = static_cast<unsigned>(chunks.count), head = chunk / count;
  return {head * count, 0, static_cast<int>(head), chunks};
}

}  // namespace kvq::decode
