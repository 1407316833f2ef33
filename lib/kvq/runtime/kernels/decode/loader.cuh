#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// Loading: one warp walks the line and fills the ring of stages. It also tells the kernel that combines results of
/// partial results that the others have left.
namespace kvq::decode {

template <typename T>
struct Loader {
  /// Tokens need not wait for the kernel that prepares the queries. But all of them would stand before the queries in
  /// the memory's line, which costs more than it gains where there are few: a part of the block's first tokens goes
  /// ahead, a few stages at least.
  static constexpr int kFirstShare = 5, kLeastFirst = 4;
  static constexpr int kPieces = T::kExact ? 1 : T::kStageTiles;  ///< pages that a stage may lie in
  /// Of exact tokens in windows: constants, since what the layout would compute stands before a block's first copy.
  static constexpr int kTileSide = kTileTokens * T::kHeadDim * 2, kTilePair = 2 * kTileSide;
  const DecodeParams& p;
  typename T::Shared& shared;
  int lane;
  int stage = 0;
  unsigned parity = 1;       ///< the first round of the ring is free
  int place = 0;             ///< of the next item
  unsigned left_parity = 1;  ///< of the next item's place
  int items = 0;             ///< before the next one

  /// One stage, as one lane describes it.
  struct Job {
    typename T::StageInfo info;
    const std::byte* from[kPieces];  ///< exact: keys; coded: the head's tiles in each page
    int values;                      ///< exact or whole: byte of the values behind the keys, 0 if in one run with them
    bool whole;                      ///< all coded tokens of the stage, in one page
  };

  __device__ __forceinline__ Job describe(const Walk& walk, int slot, int flags, bool used) const {
    const Span& span = walk.span;
    Job job{{flags, 0, 0, 0}, {}, 0, false};
    if (!used) return job;
    const int page_tiles = 1 << (p.page_shift - 4);
    if (slot < span.coded_slots) {
      const int first = (span.coded_stage + slot) * T::kStageTokens;
      job.info = {flags | (T::kExact ? kStageExact : kStageCoded), first, span.coded_begin, span.coded_end};
      const std::int32_t* table =
          p.page_table + (p.page_indptr ? __ldcg(p.page_indptr + walk.sequence) : walk.sequence * p.page_table_stride);
      const std::byte* pages = p.pages + static_cast<std::int64_t>(walk.head) * page_tiles * T::kTileBytes;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int token = first + (k << p.page_shift);
        if (k == 0 || ((k << p.page_shift) < T::kStageTokens && token < span.coded_end))
          job.from[k] = pages + __ldcg(table + (token >> p.page_shift)) * p.page_stride;
      }
      if constexpr (!T::kExact) {
        job.whole =
            page_tiles >= T::kStageTiles && first >= span.coded_begin && first + T::kStageTokens <= span.coded_end;
        if (job.whole && page_tiles > T::kStageTiles) {
          const int in_page = first / kTileTokens & (page_tiles - 1);
          job.from[0] += in_page * T::KSide::side().bytes();
          job.values =
              page_tiles * T::KSide::side().bytes() + in_page * (T::VSide::side().bytes() - T::KSide::side().bytes());
        }
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
      job.values = kTileSide;
      const std::int64_t head_bytes = std::int64_t{layout.tiles()} * kTilePair;
      job.from[0] = p.windows +
                    (static_cast<std::int64_t>(__ldcg(p.window_slots + walk.sequence)) * p.num_kv_heads + walk.head) *
                        head_bytes +
                    static_cast<std::int64_t>(part / 2) * kTilePair + part % 2 * T::kExactBytes;
    }
    return job;
  }

  /// Copies of tokens to shared memory; with bulk copies by one lane, else by all.
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes, unsigned full) {
#if __CUDA_ARCH__ >= 900
    // What is small and read by all, tables, rotations, code, shall stay in the cache beside them.
    ptx::cp_async_bulk_evict_first(ptx::shared_address(to), from, static_cast<unsigned>(bytes), full);
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
    if (job.whole) {  // as most are: few instructions, for this warp is what all others wait for
      if (announces) announce(job.info, at, T::kCodedBytes);
      copy(to, job.from[0], job.values ? T::kValuesAt : T::kCodedBytes, full);
      if (job.values) copy(to + T::kValuesAt, job.from[0] + job.values, T::kCodedBytes - T::kValuesAt, full);
      return;
    }
    constexpr int kKeyBytes = T::KSide::side().bytes(), kValueBytes = T::VSide::side().bytes();
    const int page_tiles = 1 << (p.page_shift - 4);
    const bool coded = !T::kExact && (job.info.flags & kStageCoded);
    const int from_tile = coded ? max(0, (job.info.begin - job.info.first) / kTileTokens) : 0;
    const int to_tile =
        coded ? min(T::kStageTiles, (job.info.end - job.info.first + kTileTokens - 1) / kTileTokens) : 0;
    const int bytes = coded                          ? (to_tile - from_tile) * T::kTileBytes
                      : job.info.flags & kStageExact ? 2 * T::kExactBytes
                                                     : 0;
    if (announces) announce(job.info, at, bytes);
    if (coded) {
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
  }

  /// Loads the jobs that the first `count` lanes hold, in order.
  __device__ __forceinline__ void load(const Job& job, int count) {
#if __CUDA_ARCH__ >= 900
    // A few lanes at a time: what one job costs would not keep up with the memory.
    constexpr int kAtOnce = T::kStages < 4 ? T::kStages : 4;
    for (int base = 0; base < count; base += kAtOnce) {
      const int n = min(kAtOnce, count - base), mine = lane - base;
      // All lanes wait for each stage: lanes that wait for different barriers would do so in a busy loop.
      for (int i = 0; i < n; ++i) {
        const bool wraps = stage + i >= T::kStages;
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage + i - (wraps ? T::kStages : 0)]),
                           parity ^ (wraps ? 1u : 0u));
      }
      __syncwarp();
      if (mine >= 0 && mine < n) {
        const int at = stage + mine - (stage + mine >= T::kStages ? T::kStages : 0);
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
      theirs.whole = __shfl_sync(kAll, static_cast<int>(job.whole), i) != 0;
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

  /// Loads an item's queries into its place.
  __device__ __forceinline__ void load_queries(const Walk& walk) {
    const typename T::Operand* from =
        static_cast<const typename T::Operand*>(p.operands) + walk.sequence * p.num_kv_heads + walk.head;
    const unsigned ready = ptx::shared_address(&shared.ready[place]);
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ready, sizeof(typename T::Operand));
      ptx::cp_async_bulk(ptx::shared_address(&shared.operands[place]), from, sizeof(typename T::Operand), ready);
    }
    __syncwarp();
#else
    if (lane == 0) ptx::mbarrier_arrive(ready);
    copy(&shared.operands[place], from, sizeof(typename T::Operand), ready);
    ptx::cp_async_mbarrier_arrive_noinc(ready);
#endif
  }
  /// Waits until the partial result of the item that has the next place, if any, has been left, and tells of it. That
  /// takes until memory has all of it: a microsecond, in which those who left it had better attend to tokens.
  __device__ __forceinline__ void finish_item() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.left[place]), left_parity);
    if (items >= T::kItems && lane == 0) {
      const Part part = shared.parts[place];
      ptx::red_release_add(p.arrivals + part.item, Arrivals::of(part));
    }
    __syncwarp();
  }
  __device__ __forceinline__ void next_place() {
    ++items;
    if (++place == T::kItems) place = 0, left_parity ^= 1;
  }
  /// The next piece to load: the first ones go by the number of the block, the others to who asks.
  __device__ __forceinline__ int claim(const Cut& cut) const {
    if (cut.rounds == 1) return cut.pieces();
    int claimed = 0;
    if (lane == 0) claimed = atomicAdd(p.claims, 1);
    return cut.each + __shfl_sync(kAll, claimed, 0);
  }

  /// Loads the block's pieces of the line.
  __device__ void run(const Cut& cut) {
    bool first = true;
    for (int piece = static_cast<int>(blockIdx.x); piece < cut.pieces(); piece = claim(cut)) {
      const auto [begin, end] = cut.range_of(piece);
      for (Walk walk = find_item<T>(p, shared.line, begin, lane);; next_item<T>(p, shared.line, walk)) {
        const int n = walk.span.slots;
        const int from = static_cast<int>(max(begin, walk.slot) - walk.slot);
        const int to = static_cast<int>(min(end - walk.slot, static_cast<unsigned>(n)));
        finish_item();
        if (lane == 0)
          shared.parts[place] = Part{walk.sequence * p.num_kv_heads + walk.head, piece, from == 0, to == n};
        __syncwarp();  // any lane may announce the stages that refer to it
        if (!first) load_queries(walk);
        const int label = place << kStageItemShift, padded = (to - from + T::kTeams - 1) / T::kTeams * T::kTeams;
        for (int base = 0, count; base < padded; base += count) {
          const int most = first ? min(T::kStages, max(kLeastFirst, (to - from) / kFirstShare)) : 32;
          count = min(most, padded - base);
          const int i = base + lane;
          const int flags = label | (i < T::kTeams ? kStageFirst : 0) | (i >= padded - T::kTeams ? kStageLast : 0);
          load(describe(walk, from + i, flags, from + i < to), count);
          if (first) {
            ptx::griddepcontrol_wait();
            ptx::griddepcontrol_launch_dependents();
            load_queries(walk);
            first = false;
          }
        }
        next_place();
        if (walk.slot + n >= end) break;
      }
    }
    load(Job{{kStageEnd, 0, 0, 0}, {}, 0, false}, T::kTeams);
    for (int i = 0; i < T::kItems; ++i) finish_item(), next_place();
  }
};

}  // namespace kvq::decode
