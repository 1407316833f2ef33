#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// The producer warp: it walks the block's splits of the chunk queue and fills the ring of stages. It also signals the
/// combine kernel, but late: when a work tile's query buffer is used again (kQueryBuffers work tiles later) or the
/// block ends, so that it rarely waits for the partial result to be stored.
namespace kvq::decode {

template <typename T>
struct Producer {
  static constexpr int kFirstLoadDivisor = T::kPolicy.first_load_divisor, kLeastFirstLoad = T::kPolicy.least_first_load;
  static constexpr int kStagePages = T::kExact ? 1 : T::kStageTiles;  ///< most pages that a stage's tokens come from
  /// Bytes of a tile of exact tokens in windows: of one side, of keys and values. Constants, because computing them
  /// from the layout would delay a block's first copy.
  static constexpr int kWindowTileBytes = kTileTokens * T::kHeadDim * 2, kWindowPairBytes = 2 * kWindowTileBytes;
  const DecodeKernelParams& p;
  typename T::DecodeShared& shared;
  int lane;
  int stage = 0;
  unsigned parity = 1;         ///< phase of the `empty` barriers; in the first pass over the ring all stages are free
  int buffer = 0;              ///< query buffer of the next work tile
  unsigned stored_parity = 1;  ///< phase of the partial barrier of that buffer
  bool first = true;           ///< no stage has been loaded
  int work_tiles = 0;          ///< work tiles begun so far; run() counts further ones at its end

  /// The source of one stage. Each lane prepares one.
  struct ChunkSource {
    typename T::StageInfo info;
    const std::byte* from[kStagePages];  ///< exact: keys; coded: the head's tiles in each page
    int values_offset;  ///< exact or whole: bytes from keys to values; 0: values follow keys without a gap
    bool whole;         ///< all tokens of the stage are coded, visible and in one page
  };

  __device__ __forceinline__ int page_tiles() const {
    static_assert(kTileTokens == 1 << 4);
    return 1 << (p.cache.page_shift - 4);
  }

  /// The source of KV chunk `chunk` of a work tile.
  /// @param used  false: an empty stage, which has flags only
  __device__ __forceinline__ ChunkSource describe(const WorkTile& work_tile, int chunk, int flags, bool used) const {
    const TileChunks& chunks = work_tile.chunks;
    ChunkSource source{{flags, 0, 0, 0}, {}, 0, false};
    if (!used) return source;
    const int page_tiles = this->page_tiles(), sequence = sequence_of(p, work_tile.pass);
    // Tokens of the stage: do all rows see all of them that any row sees?
    const auto ragged = [&](int first, int size, int begin, int end) {
      return max(first, begin) < chunks.seen_by_all.begin || min(first + size, end) > chunks.seen_by_all.end
                 ? kStageRagged
                 : 0;
    };
    if (chunk < chunks.coded_chunks) {
      const int first = (chunks.first_coded_chunk + chunk) * T::kStageTokens;
      source.info = {flags | (T::kExact ? kStageExact : kStageCoded) |
                         ragged(first, T::kStageTokens, chunks.coded_begin, chunks.coded_end),
                     first, chunks.coded_begin, chunks.coded_end};
      const std::int32_t* table = table_of(p.cache, sequence);
      const std::byte* pages = p.cache.pages + static_cast<std::int64_t>(work_tile.head) * page_tiles * T::kTileBytes;
      // The chunk's pages that have a token to read; entries of other pages may be anything, or lie beyond the table.
      const auto is_read = [&](int k) {
        const int token = first + (k << p.cache.page_shift), page_end = token + (1 << p.cache.page_shift);
        return (k << p.cache.page_shift) < T::kStageTokens && token < chunks.coded_end && page_end > chunks.coded_begin;
      };
      // All page numbers are loaded before one of them is looked at.
      int numbers[kStagePages] = {}, wrong_number = 0;
      bool wrong = false;
#pragma unroll
      for (int k = 0; k < kStagePages; ++k)
        if (is_read(k)) numbers[k] = __ldcg(table + (first >> p.cache.page_shift) + k);
#pragma unroll
      for (int k = 0; k < kStagePages; ++k) {
        if (is_read(k) && !is_page(p.cache, numbers[k])) wrong = true, wrong_number = numbers[k];
        source.from[k] = pages + numbers[k] * p.cache.page_stride;
      }
      if (wrong) {  // the page cannot be read: nothing is loaded, and the result is NaN
        record_fault(p.cache.faults, {FaultCode::page, wrong_number}, sequence, p.cache.layer);
        source.info = {flags | kStageFaulty, 0, 0, 0};
        return source;
      }
      if constexpr (!T::kExact) {
        source.whole =
            page_tiles >= T::kStageTiles && first >= chunks.coded_begin && first + T::kStageTokens <= chunks.coded_end;
        if (source.whole && page_tiles > T::kStageTiles) {
          const int in_page = first / kTileTokens & (page_tiles - 1);
          source.from[0] += in_page * T::KSide::side().bytes();
          source.values_offset =
              page_tiles * T::KSide::side().bytes() + in_page * (T::VSide::side().bytes() - T::KSide::side().bytes());
        }
      }
      if constexpr (T::kExact) {
        constexpr int kKeyBytes = T::KSide::side().bytes();
        const int row = first & ((1 << p.cache.page_shift) - 1);
        source.from[0] += row / kTileTokens * kKeyBytes + row % kTileTokens * (T::kHeadDim * 2);
        source.values_offset = page_tiles * kKeyBytes;
      }
    } else {
      const int index = chunk - chunks.coded_chunks, recent = index - chunks.sink_chunks;
      const bool is_sink = recent < 0;
      const int first = (is_sink ? chunks.first_sink_chunk + index : chunks.first_recent_chunk + recent);
      const int rows = is_sink ? p.cache.sink_layout.rows : p.cache.ring_layout.rows;
      const int slot = __ldcg((is_sink ? p.cache.sink_slots : p.cache.ring_slots) + sequence);
      const int exact_chunk = first % (rows / T::kExactTokens);
      const int begin = is_sink ? chunks.begin : chunks.coded_end, end = is_sink ? chunks.sink_end : chunks.end;
      source.info = {flags | kStageExact | ragged(first * T::kExactTokens, T::kExactTokens, begin, end),
                     first * T::kExactTokens, begin, end};
      source.values_offset = kWindowTileBytes;
      source.from[0] =
          (is_sink ? p.cache.sinks : p.cache.rings) +
          (std::int64_t{slot} * p.cache.num_kv_heads + work_tile.head) * (rows / kTileTokens) * kWindowPairBytes +
          static_cast<std::int64_t>(exact_chunk / 2) * kWindowPairBytes + exact_chunk % 2 * T::kExactBytes;
    }
    return source;
  }

  /// Copies keys or values to shared memory. One lane calls it where there are bulk copies, else all lanes.
  __device__ __forceinline__ void copy(void* to, const void* from, int bytes, unsigned full) {
    // Keys and values are evicted first, so that L2 keeps what all blocks read: page tables, rotations, instructions.
    async_copy::start_evict_first(to, from, bytes, full, lane);
  }
  /// Writes the information of stage `at` and arms its barrier for copies of so many bytes.
  __device__ __forceinline__ void arm(const typename T::StageInfo& info, int at, int bytes) {
    shared.info[at] = info;
    async_copy::expect(ptx::shared_address(&shared.full[at]), bytes);
  }
  /// Starts the copies of a source into stage `at`.
  /// @param arms  this lane writes the stage's information and arms its barrier; one lane does
  __device__ __forceinline__ void start(const ChunkSource& source, int at, bool arms) {
    unsigned char* to = shared.stages[at];
    const unsigned full = ptx::shared_address(&shared.full[at]);
    if (source.whole) {  // the common case, with few instructions because all consumer warps wait for this warp
      if (arms) arm(source.info, at, T::kCodedBytes);
      copy(to, source.from[0], source.values_offset ? T::kValuesAt : T::kCodedBytes, full);
      if (source.values_offset)
        copy(to + T::kValuesAt, source.from[0] + source.values_offset, T::kCodedBytes - T::kValuesAt, full);
      return;
    }
    constexpr int kKeyBytes = T::KSide::side().bytes(), kValueBytes = T::VSide::side().bytes();
    const int page_tiles = this->page_tiles();
    const bool coded = !T::kExact && (source.info.flags & kStageCoded);
    const int from_tile = coded ? max(0, (source.info.begin - source.info.first) / kTileTokens) : 0;
    const int to_tile =
        coded ? min(T::kStageTiles, (source.info.end - source.info.first + kTileTokens - 1) / kTileTokens) : 0;
    const int bytes = coded                             ? (to_tile - from_tile) * T::kTileBytes
                      : source.info.flags & kStageExact ? 2 * T::kExactBytes
                                                        : 0;
    if (arms) arm(source.info, at, bytes);
    if (coded) {
#pragma unroll
      for (int k = 0; k < kStagePages; ++k) {
        const int tile = max(from_tile, k * page_tiles), count = min(to_tile, (k + 1) * page_tiles) - tile;
        if (count <= 0) continue;
        const int in_page = (source.info.first / kTileTokens + tile) & (page_tiles - 1);
        copy(to + tile * kKeyBytes, source.from[k] + in_page * kKeyBytes, count * kKeyBytes, full);
        copy(to + T::kValuesAt + tile * kValueBytes, source.from[k] + page_tiles * kKeyBytes + in_page * kValueBytes,
             count * kValueBytes, full);
      }
    } else if (bytes) {
      copy(to, source.from[0], T::kExactBytes, full);
      copy(to + T::kExactBytes, source.from[0] + source.values_offset, T::kExactBytes, full);
    }
  }

  /// Loads the sources that the first `count` lanes hold, in order.
  __device__ __forceinline__ void load(const ChunkSource& source, int count) {
    if constexpr (async_copy::kBulk)
      load_by_lanes(source, count);
    else
      load_by_warp(source, count);
  }
  /// Each lane issues the copies of its own source.
  __device__ __forceinline__ void load_by_lanes(const ChunkSource& source, int count) {
    constexpr int kIssueAtOnce = T::kStages < T::kPolicy.loads_at_once ? T::kStages : T::kPolicy.loads_at_once;
    for (int base = 0; base < count; base += kIssueAtOnce) {
      const int n = min(kIssueAtOnce, count - base), mine = lane - base;
      // All lanes wait for each stage, because lanes that wait for different barriers would diverge, and each would
      // spin in turn. The first load finds all stages free.
      for (int i = 0; i < n && !first; ++i) {
        const bool wraps = stage + i >= T::kStages;
        ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage + i - (wraps ? T::kStages : 0)]),
                           parity ^ (wraps ? 1u : 0u));
      }
      __syncwarp();
      if (mine >= 0 && mine < n) {
        const int at = stage + mine - (stage + mine >= T::kStages ? T::kStages : 0);
        start(source, at, true);
      }
      __syncwarp();
      stage += n;
      if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
    }
  }
  /// All lanes issue the copies of one source after the other.
  __device__ __forceinline__ void load_by_warp(const ChunkSource& source, int count) {
    for (int i = 0; i < count; ++i) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity);
      ChunkSource theirs;
      theirs.info = {__shfl_sync(kAll, source.info.flags, i), __shfl_sync(kAll, source.info.first, i),
                     __shfl_sync(kAll, source.info.begin, i), __shfl_sync(kAll, source.info.end, i)};
      theirs.values_offset = __shfl_sync(kAll, source.values_offset, i);
      theirs.whole = __shfl_sync(kAll, static_cast<int>(source.whole), i) != 0;
#pragma unroll
      for (int k = 0; k < kStagePages; ++k)
        theirs.from[k] = reinterpret_cast<const std::byte*>(
            __shfl_sync(kAll, reinterpret_cast<unsigned long long>(source.from[k]), i));
      start(theirs, stage, lane == 0);
      async_copy::finish(ptx::shared_address(&shared.full[stage]));
      if (++stage == T::kStages) stage = 0, parity ^= 1;
    }
  }

  /// Loads the queries of a work tile into its buffer.
  __device__ __forceinline__ void load_queries(const WorkTile& work_tile) {
    const typename T::Operand* from =
        static_cast<const typename T::Operand*>(p.operands) + work_tile.pass * p.cache.num_kv_heads + work_tile.head;
    async_copy::copy(&shared.operands[buffer], from, sizeof(typename T::Operand),
                     ptx::shared_address(&shared.queries_full[buffer]), lane);
  }
  /// Before a query buffer is used again: waits until the partial result of the buffer's previous work tile, if any,
  /// has been stored, then adds to that work tile's completion counter. The release takes about a microsecond, until
  /// all of the partial result is in global memory; meanwhile the consumer warps attend to the next tokens.
  __device__ __forceinline__ void signal_partial() {
    ptx::mbarrier_wait(ptx::shared_address(&shared.partials_stored[buffer]), stored_parity);
    if (work_tiles >= T::kQueryBuffers && lane == 0) {
      const PartialId id = shared.partial_ids[buffer];
      ptx::red_release_add(p.completions + id.work_tile, CompletionCounter::increment(id));
    }
    __syncwarp();
  }
  __device__ __forceinline__ void next_buffer() {
    ++work_tiles;
    if (++buffer == T::kQueryBuffers) buffer = 0, stored_parity ^= 1;
  }
  /// The next split of this block after its first one: claimed from the work counter.
  __device__ __forceinline__ int claim(const Splits& splits) const {
    if (splits.rounds == 1) return splits.count();
    int claimed = 0;
    if (lane == 0) claimed = atomicAdd(p.work_counter, 1);
    return splits.per_round + __shfl_sync(kAll, claimed, 0);
  }

  /// Loads all splits of the block, each one work tile by work tile.
  /// @param single_pass  chunks of a work tile, if there is a single pass
  __device__ void run(const Splits& splits, const TileChunks& single_pass) {
    for (int split = static_cast<int>(blockIdx.x); split < splits.count(); split = claim(splits)) {
      const auto [begin, end] = splits.range_of(split);
      for (WorkTile work_tile = p.num_passes() == 1 ? find_work_tile(single_pass, begin)
                                                    : find_work_tile<T>(p, shared.queue, begin, lane);
           ; next_work_tile<T>(p, shared.queue, work_tile)) {
        const int n = work_tile.chunks.count;
        const int from = static_cast<int>(max(begin, work_tile.first_chunk) - work_tile.first_chunk);
        const int to = static_cast<int>(min(end - work_tile.first_chunk, static_cast<unsigned>(n)));
        signal_partial();
        if (lane == 0)
          shared.partial_ids[buffer] =
              PartialId{work_tile.pass * p.cache.num_kv_heads + work_tile.head, split, from == 0, to == n};
        __syncwarp();  // any lane may arm a stage that refers to this entry of `partial_ids`
        if (!first) load_queries(work_tile);
        // A work tile takes a multiple of kConsumerWarps stages, so that each consumer warp has a first and a last
        // one, and KV chunk i of a split's part of the work tile always goes to the same warp. Stages beyond the
        // chunks are empty.
        const int label = buffer << kStageBufferShift |
                          (T::kBitTiles && to > work_tile.chunks.coded_chunks ? kStageExactPart : 0),
                  padded = (to - from + T::kConsumerWarps - 1) / T::kConsumerWarps * T::kConsumerWarps;
        for (int base = 0, count; base < padded; base += count) {
          const int most = first ? min(T::kStages, max(kLeastFirstLoad, (to - from) / kFirstLoadDivisor)) : 32;
          count = min(most, padded - base);
          const int i = base + lane;
          const int flags =
              label | (i < T::kConsumerWarps ? kStageFirst : 0) | (i >= padded - T::kConsumerWarps ? kStageLast : 0);
          load(describe(work_tile, from + i, flags, from + i < to), count);
          if (first) {
            ptx::griddepcontrol_wait();
            ptx::griddepcontrol_launch_dependents();
            load_queries(work_tile);
            first = false;
          }
        }
        next_buffer();
        if (work_tile.first_chunk + n >= end) break;
      }
    }
    load(ChunkSource{{kStageEnd, 0, 0, 0}, {}, 0, false}, T::kConsumerWarps);
    // Signals the last partial results, as if further work tiles used the query buffers. `work_tiles` grows on, too, so
    // that signal_partial() skips a buffer that had no work tile.
    for (int i = 0; i < T::kQueryBuffers; ++i) signal_partial(), next_buffer();
  }
};

}  // namespace kvq::decode
