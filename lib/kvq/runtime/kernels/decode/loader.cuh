#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// The producer warp: it walks the line (work queue) and fills the ring of stages. It also signals the combine kernel
/// as each partial result reaches global memory.
namespace kvq::decode {

template <typename T>
struct Loader {
  /// Loads of keys and values need not wait for the queries kernel. But if all of them were issued first, the loads of
  /// the queries would queue behind them, which costs more than it gains for short splits. So the block's first load
  /// issues 1/kFirstShare of its first item's stages, kLeastFirst at least, before the queries.
  static constexpr int kFirstShare = 5, kLeastFirst = 4;
  static constexpr int kPieces = T::kExact ? 1 : T::kStageTiles;  ///< most pages that a stage's tokens come from
  /// Bytes of a tile of exact tokens in windows. Constants, because computing them from the layout would delay a
  /// block's first copy.
  static constexpr int kTileSide = kTileTokens * T::kHeadDim * 2, kTilePair = 2 * kTileSide;
  const DecodeParams& p;
  typename T::Shared& shared;
  int lane;
  int stage = 0;
  unsigned parity = 1;       ///< phase of the `empty` barriers; in the first round all stages are free
  int place = 0;             ///< query buffer of the next item (work tile)
  unsigned left_parity = 1;  ///< phase of the `left` barrier (partial result stored) of that buffer
  int items = 0;             ///< items begun so far

  /// The source of one stage. Each lane prepares one.
  struct Job {
    typename T::StageInfo info;
    const std::byte* from[kPieces];  ///< exact: keys; coded: the head's tiles in each page
    int values;                      ///< exact or whole: bytes from keys to values; 0: values follow keys without a gap
    bool whole;                      ///< all tokens of the stage are coded, visible and in one page
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

  /// Copies keys or values to shared memory. One lane calls it where there are bulk copies, else all lanes.
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes, unsigned full) {
#if __CUDA_ARCH__ >= 900
    // Keys and values are evicted first, so that L2 keeps what all blocks read: page tables, rotations, instructions.
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
    if (job.whole) {  // the common case, with few instructions because all consumer warps wait for this warp
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
    // A few lanes at a time, because one lane that issues one job after the other does not keep up with the memory.
    constexpr int kAtOnce = T::kStages < 4 ? T::kStages : 4;
    for (int base = 0; base < count; base += kAtOnce) {
      const int n = min(kAtOnce, count - base), mine = lane - base;
      // All lanes wait for each stage, because lanes that wait for different barriers would spin.
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

  /// Loads the queries of an item into its buffer.
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
  /// Before a query buffer is used again: waits until the partial result of the buffer's previous item, if any, has
  /// been stored, then adds to that item's completion counter. The release takes about a microsecond, until all of the
  /// partial result is in global memory; meanwhile the consumer warps attend to the next tokens.
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
  /// The next piece (split) of this block, behind the first one: claimed from the work counter.
  __device__ __forceinline__ int claim(const Cut& cut) const {
    if (cut.rounds == 1) return cut.pieces();
    int claimed = 0;
    if (lane == 0) claimed = atomicAdd(p.claims, 1);
    return cut.each + __shfl_sync(kAll, claimed, 0);
  }

  /// Loads all pieces of the block, each item by item.
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
        __syncwarp();  // any lane may announce a stage that refers to this entry of `parts`
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
