#pragma once

#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// Loading: one warp walks the line and fills the ring of stages.
namespace kvq::decode {

template <typename T>
struct Loader {
  static constexpr int kPieces = T::kExact ? 1 : T::kStageTiles;  ///< pages that a stage may lie in
  const DecodeParams& p;
  typename T::Shared& shared;
  int lane;
  int stage = 0;
  unsigned parity = 1;       ///< the first round of the ring is free
  unsigned waiting = 0;      ///< bit of each place in `items` whose partial result is not announced yet
  unsigned left_parity = 0;  ///< bit of each place
  int merge = 0;

  /// One stage, as one lane describes it.
  struct Job {
    typename T::StageInfo info;
    const std::byte* from[kPieces];  ///< exact: keys; coded: the head's tiles in each page
    int values;                      ///< exact: byte of the values behind the keys
    const void* queries;             ///< of the item, with its first stage; else null
  };

  __device__ __forceinline__ Job describe(const Walk& walk, int slot, int flags, bool used, const void* queries) const {
    const Span& span = walk.span;
    Job job{{flags, 0, 0, 0}, {}, 0, queries};
    if (!used) return job;
    const int page_tiles = 1 << (p.page_shift - 4);
    if (slot < span.coded_slots) {
      const int first = (span.coded_stage + slot) * T::kStageTokens;
      job.info = {flags | (T::kExact ? kStageExact : kStageCoded), first, span.coded_begin, span.coded_end};
      const std::int32_t* table =
          p.page_table + (p.page_indptr ? p.page_indptr[walk.sequence] : walk.sequence * p.page_table_stride);
      const std::byte* pages = p.pages + static_cast<std::int64_t>(walk.head) * page_tiles * T::kTileBytes;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int token = first + (k << p.page_shift);
        if (k == 0 || ((k << p.page_shift) < T::kStageTokens && token < span.coded_end))
          job.from[k] = pages + table[token >> p.page_shift] * p.page_stride;
      }
      if constexpr (T::kExact) {
        constexpr int kKeyBytes = T::KSide::side().bytes();
        const int row = first & ((1 << p.page_shift) - 1);
        job.from[0] += row / kTileTokens * kKeyBytes + row % kTileTokens * (T::kHeadDim * 2);
        job.values = page_tiles * kKeyBytes;
      }
    } else {
      const WindowLayout& layout = p.window_layout;
      const int index = slot - span.coded_slots, recent = index - span.sink_slots;
      const int part = recent < 0 ? span.sink_part + index
                                  : layout.sink_rows / T::kExactTokens +
                                        (span.recent_part + recent) % (layout.ring_rows / T::kExactTokens);
      if (recent < 0)
        job.info = {flags | kStageExact, part * T::kExactTokens, span.first, min(p.sink_tokens, span.length)};
      else
        job.info = {flags | kStageExact, p.sink_tokens + (span.recent_part + recent) * T::kExactTokens,
                    span.recent_begin, span.length};
      job.values = kTileTokens * T::kHeadDim * 2;
      job.from[0] = p.windows + p.window_slots[walk.sequence] * layout.slot_bytes() + walk.head * layout.head_bytes() +
                    static_cast<std::int64_t>(part / 2) * (2 * job.values) + part % 2 * T::kExactBytes;
    }
    return job;
  }

  /// Copies to shared memory; with bulk copies by one lane, else by all.
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes, unsigned full) {
#if __CUDA_ARCH__ >= 900
    ptx::cp_async_bulk(ptx::shared_address(to), from, static_cast<unsigned>(bytes), full);
#else
    for (int i = lane * 16; i < bytes; i += 512)
      ptx::cp_async_16(ptx::shared_address(to) + static_cast<unsigned>(i), static_cast<const std::byte*>(from) + i);
#endif
  }
  __device__ __forceinline__ void announce(const typename T::StageInfo& info, int at, int bytes) {
    shared.info[at] = info;
#if __CUDA_ARCH__ >= 900
    ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&shared.full[at]), static_cast<unsigned>(bytes));
#else
    ptx::mbarrier_arrive(ptx::shared_address(&shared.full[at]));
#endif
  }
  /// Starts the copies of a job into stage `at`. @param announces  the lane that writes the stage's information
  __device__ __forceinline__ void start(const Job& job, int at, bool announces) {
    unsigned char* to = shared.stages[at];
    const unsigned full = ptx::shared_address(&shared.full[at]);
    const int query_bytes = job.queries ? p.num_q_heads / p.num_kv_heads * T::kHeadDim * 2 : 0;
    constexpr int kKeyBytes = T::KSide::side().bytes(), kValueBytes = T::VSide::side().bytes();
    const int page_tiles = 1 << (p.page_shift - 4);
    const bool coded = !T::kExact && (job.info.flags & kStageCoded);
    const int from_tile = coded ? max(0, (job.info.begin - job.info.first) / kTileTokens) : 0;
    const int to_tile =
        coded ? min(T::kStageTiles, (job.info.end - job.info.first + kTileTokens - 1) / kTileTokens) : 0;
    const int bytes = coded                          ? (to_tile - from_tile) * T::kTileBytes
                      : job.info.flags & kStageExact ? 2 * T::kExactBytes
                                                     : 0;
    if (announces) announce(job.info, at, bytes + query_bytes);
    if (coded && page_tiles == T::kStageTiles && bytes == T::kCodedBytes) {  // the stage is a page
      copy(to, job.from[0], T::kCodedBytes, full);
    } else if (coded) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int tile = max(from_tile, k * page_tiles), count = min(to_tile, (k + 1) * page_tiles) - tile;
        if (count <= 0) continue;
        const int in_page = (job.info.first / kTileTokens + tile) & (page_tiles - 1);
        copy(to + tile * kKeyBytes, job.from[k] + in_page * kKeyBytes, count * kKeyBytes, full);
        copy(to + T::kValuesAt + tile * kValueBytes, job.from[k] + page_tiles * kKeyBytes + in_page * kValueBytes,
             count * kValueBytes, full);
      }
    } else if (bytes) {
      copy(to, job.from[0], T::kExactBytes, full);
      copy(to + T::kExactBytes, job.from[0] + job.values, T::kExactBytes, full);
    }
    if (query_bytes) copy(shared.raw_q[job.info.flags >> kStageItemShift], job.queries, query_bytes, full);
  }

  /// Loads the jobs that the first `count` lanes hold, in order.
  __device__ __forceinline__ void load(const Job& job, int count) {
#if __CUDA_ARCH__ >= 900
    // A few lanes at a time: what one job costs would not keep up with the memory.
    constexpr int kAtOnce = T::kStages < 4 ? T::kStages : 4;
    for (int base = 0; base < count; base += kAtOnce) {
      const int n = min(kAtOnce, count - base), mine = lane - base;
      if (mine >= 0 && mine < n) {
        const bool wraps = stage + mine >= T::kStages;
        const int at = stage + mine - (wraps ? T::kStages : 0);
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[at]), parity ^ (wraps ? 1u : 0u));
        start(job, at, true);
      }
      __syncwarp();
      stage += n;
      if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
    }
#else
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity);
      Job theirs;
      theirs.info = {__shfl_sync(kAll, job.info.flags, i), __shfl_sync(kAll, job.info.first, i),
                     __shfl_sync(kAll, job.info.begin, i), __shfl_sync(kAll, job.info.end, i)};
      theirs.values = __shfl_sync(kAll, job.values, i);
      theirs.queries =
          reinterpret_cast<const void*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(job.queries), i));
#pragma unroll
      for (int k = 0; k < kPieces; ++k)
        theirs.from[k] =
            reinterpret_cast<const std::byte*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(job.from[k]), i));
      start(theirs, stage, lane == 0);
      ptx::cp_async_mbarrier_arrive_noinc(ptx::shared_address(&shared.full[stage]));
      if (++stage == T::kStages) stage = 0, parity ^= 1;
    }
#endif
  }

  /// Announces the partial result of the item at `place`, once the warps have left it. The last one to be announced is
  /// merged by the block that announces it: one more job for the ring.
  __device__ __forceinline__ void announce_partial(int place) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.left[place]), left_parity >> place & 1);
    left_parity ^= 1u << place;
    waiting &= ~(1u << place);
    const typename T::Item item = shared.items[place];
    int last = 0;
    if (lane == 0) {
      std::int32_t* arrivals = p.arrivals + static_cast<std::int64_t>(item.sequence) * p.num_kv_heads + item.head;
      __threadfence();  // covers what the warps wrote before the barrier
      last = atomicAdd(arrivals, 1) == item.last_piece - item.first_piece;
      if (last) {
        *arrivals = 0;
        shared.merges[merge] = item;
      }
      __threadfence();
    }
    __syncwarp();  // any lane may announce the job that tells of it
    if (__shfl_sync(kAll, last, 0)) {
      load(Job{{kStageMerge | merge << kStageItemShift, 0, 0, 0}, {}, 0, nullptr}, T::kTeams);
      if (++merge == T::kItems) merge = 0;
    }
  }
  /// The oldest place that waits: places are used round and round, `next` is the one to be used next.
  __device__ __forceinline__ int oldest(int next) const {
    while (!(waiting >> next & 1)) next = next + 1 == T::kItems ? 0 : next + 1;
    return next;
  }

  /// Loads the block's piece of the line.
  __device__ void run(const Cut& cut) {
    const int piece = static_cast<int>(blockIdx.x), group_heads = p.num_q_heads / p.num_kv_heads;
    const long long begin = cut.begin_of(piece), end = cut.begin_of(piece + 1);
    Walk walk;
    walk.sequence = shared.first_sequence;
    walk.span = span_of<T>(p, walk.sequence);
    walk.head = static_cast<int>((begin - shared.first_slot) / walk.span.slots);
    walk.slot = shared.first_slot + static_cast<long long>(walk.head) * walk.span.slots;
    for (int place = 0;; next_item<T>(p, walk)) {
      while (waiting >> place & 1) announce_partial(oldest(place));
      const int n = walk.span.slots;
      const int from = static_cast<int>(max(begin - walk.slot, 0LL));
      const int to = static_cast<int>(min(end - walk.slot, static_cast<long long>(n)));
      // A piece shares at most two items: the one it begins in (record 0) and the one that begins in it and does not
      // end there (record 1).
      const bool whole = from == 0 && to == n;
      if (lane == 0)
        shared.items[place] = {walk.sequence, walk.head, whole ? -1 : 2 * piece + (from == 0), cut.piece_of(walk.slot),
                               cut.piece_of(walk.slot + n - 1)};
      __syncwarp();  // any lane may announce the stages that refer to it
      const int label = place << kStageItemShift, padded = (to - from + T::kTeams - 1) / T::kTeams * T::kTeams;
      const void* queries = static_cast<const typename T::Activation*>(p.q) + walk.sequence * p.q_stride +
                            walk.head * group_heads * T::kHeadDim;
      for (int base = 0; base < padded; base += 32) {
        const int i = base + lane;
        const int flags = label | (i < T::kTeams ? kStageFirst : 0) | (i >= padded - T::kTeams ? kStageLast : 0);
        load(describe(walk, from + i, flags, from + i < to, i == 0 ? queries : nullptr), min(32, padded - base));
      }
      if (!whole) waiting |= 1u << place;
      if (++place == T::kItems) place = 0;
      if (walk.slot + n >= end) {
        while (waiting) announce_partial(oldest(place));
        break;
      }
    }
    load(Job{{kStageEnd, 0, 0, 0}, {}, 0, nullptr}, T::kTeams);
  }
};

}  // namespace kvq::decode
