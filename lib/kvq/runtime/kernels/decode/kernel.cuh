#pragma once

#include <kvq/device/ptx.cuh>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// Decode attention over paged low-bit keys and values, straight from tiles that are laid out as tensor-core fragments
/// (formats/pages.md). Integer tensor cores multiply codes that were only masked; the float side is folded away:
///
///   key row t, group j:   k_hat = s c + m       q . k_hat = sum_j s (q_j . c_j) + m sum(q_j)
///   value row t, group j: v_hat = s c + m       out = sum_t (p_t s) c + p_t m
///
/// q is cut into a 16-bit integer per row, q_int = 256 hi + lo, and hi and lo of four query heads are the eight columns
/// of the product; so are the two halves of the weights p s, as 16-bit integers of the stage's largest. Both integer
/// products are exact.
///
///   warp lane 4 g + t      keys: tokens g, g + 8 of a tile x head t      values: rows g, g + 8 of a block x head t
///
/// One warp of a block loads: it walks the block's piece of the line (schedule.cuh) and fills a ring of stages, whose
/// owners, teams of warps, it serves in turn. A stage may also be a job: merge an item whose partial results are there.
namespace kvq::decode {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kMinusInf = -__builtin_huge_valf();
constexpr unsigned kAll = ~0u;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr unsigned kFullArrivals = 33;  ///< every lane's copies, and the announcement
#else
constexpr unsigned kFullArrivals = 1;
#endif

/// Barrier of the warps that attend.
template <typename T>
__device__ __forceinline__ void sync() {
  ptx::bar_sync(1, T::kThreads);
}

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half& y) {
  y = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

// ---- 1. Loading: one warp walks the line and fills the ring of stages --------------------------------------------

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

// ---- 2. One warp's online softmax: lane 4 g + t holds head t -----------------------------------------------------

template <typename T>
struct State {
  float out[T::kBlocks][2];         ///< block of 16 places, rows g and g + 8
  float max;                        ///< largest score in the query's unit
  float sum;                        ///< this lane's tokens only
  float minima[T::VSide::kGroups];  ///< affine: sum of p m; symmetric: sum of p s; this lane's tokens only

  __device__ __forceinline__ void reset() {
    for (auto& block : out) block[0] = block[1] = 0.0f;
    for (float& m : minima) m = 0.0f;
    max = kMinusInf;
    sum = 0.0f;
  }

  /// Takes over a stage's largest score of this lane: rescales what is there if it grew.
  /// @param unit  score in base 2 of 1
  /// @return      what to subtract from scores in base 2
  __device__ __forceinline__ float rescale(float stage_max, float unit) {
    stage_max = fmaxf(stage_max, __shfl_xor_sync(kAll, stage_max, 4));
    stage_max = fmaxf(stage_max, __shfl_xor_sync(kAll, stage_max, 8));
    stage_max = fmaxf(stage_max, __shfl_xor_sync(kAll, stage_max, 16));
    if (__any_sync(kAll, stage_max > max)) {
      const float larger = fmaxf(max, stage_max);
      const float factor = larger > max ? ptx::ex2((max - larger) * unit) : 1.0f;
      for (auto& block : out) block[0] *= factor, block[1] *= factor;
      for (float& m : minima) m *= factor;
      sum *= factor;
      max = larger;
    }
    return max == kMinusInf ? 0.0f : max * unit;
  }
};

/// Sends each lane's two words, high and low halves of its head's weights, to the lanes that need them as columns:
/// column 2 t is the high half of head t, 2 t + 1 the low one. Lane 4 g + t gets column g from the tokens 2 t (`even`)
/// and 2 t + 1 (`odd`).
__device__ __forceinline__ void exchange(unsigned high, unsigned low, int lane, unsigned& even, unsigned& odd) {
  const int g = lane >> 2, t = lane & 3;
  // Even senders serve the even columns first, odd senders the odd ones, so that each word travels once.
  const unsigned first = g & 1 ? low : high, second = g & 1 ? high : low;
  const int head_lane = g >> 1, source = 2 * t;
  const unsigned a = __shfl_sync(kAll, first, (source + (g & 1)) * 4 + head_lane);
  const unsigned b = __shfl_sync(kAll, second, (source + 1 - (g & 1)) * 4 + head_lane);
  even = g & 1 ? b : a;
  odd = g & 1 ? a : b;
}

// ---- 3. Coded stages ---------------------------------------------------------------------------------------------

template <typename Side>
__device__ __forceinline__ float2 two_numbers(unsigned bits) {
  if constexpr (Side::kBfloat)
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

/// Numbers of a group of the tokens g and g + 8: scales, and minima if affine.
template <typename Side>
struct Numbers {
  float scale[2], minimum[2];
  __device__ __forceinline__ Numbers(const unsigned char* tile_side, int group, int g) {
    const unsigned char* at = tile_side + Side::side().code_bytes() + (group * 8 + g) * 4 * Side::kNumbers;
    if constexpr (Side::kAffine) {
      const uint2 bits = *reinterpret_cast<const uint2*>(at);
      const float2 a = two_numbers<Side>(bits.x), b = two_numbers<Side>(bits.y);
      scale[0] = a.x, minimum[0] = a.y, scale[1] = b.x, minimum[1] = b.y;
    } else {
      const float2 a = two_numbers<Side>(*reinterpret_cast<const unsigned*>(at));
      scale[0] = a.x, scale[1] = a.y, minimum[0] = minimum[1] = 0.0f;
    }
  }
};

/// The lane's run of a tile's codes.
template <typename Side>
__device__ __forceinline__ void load_words(const unsigned char* tile_side, int lane,
                                           unsigned (&words)[2 * Side::kWords]) {
  constexpr int kChunk = chunk_bytes(Side::side()), kInChunk = kChunk / 4;
#pragma unroll
  for (int c = 0; c < 2 * Side::kWords / kInChunk; ++c) {
    const unsigned char* at = tile_side + (c * 32 + lane) * kChunk;
    if constexpr (kChunk == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(at);
      words[4 * c] = v.x, words[4 * c + 1] = v.y, words[4 * c + 2] = v.z, words[4 * c + 3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(at);
      words[2 * c] = v.x, words[2 * c + 1] = v.y;
    }
  }
}

/// Codes of one slice of a word, times 1 (even slices) or 2^bits (odd ones).
template <typename Side>
__device__ __forceinline__ unsigned slice_of(unsigned word, int slice) {
  if (slice >= 2) word >>= 2 * Side::kBits;
  return word & (static_cast<unsigned>(Side::kMask) << (slice % 2 * Side::kBits));
}

/// Words and slice of the two half steps of step j (page_layout.h, code_place).
template <typename Side>
struct Step {
  int word0, slice0, word1, slice1;
  __device__ constexpr explicit Step(int j) {
    constexpr int kPaired = Side::kWords / 2 * Side::kPerByte;
    if (j < kPaired) {
      word0 = j / Side::kPerByte * 2, word1 = word0 + 1;
      slice0 = slice1 = j % Side::kPerByte;
    } else {
      word0 = word1 = Side::kWords - 1;
      slice0 = (j - kPaired) * 2, slice1 = slice0 + 1;
    }
  }
};

/// The query as operand: 16-bit integers of each head in two bytes, and what turns integer products into scores.
template <typename T>
struct Query {
  using Side = typename T::KSide;
  static constexpr int kSteps = T::kHeadDim / 32;
  unsigned fragment[T::kExact ? 1 : kSteps][2];
  float unit;                 ///< base-2 score of an integer product of 1, never 0
  float exact_unit;           ///< score of an exact product of 1, in `unit`
  float sums[Side::kGroups];  ///< of q over the group times 2^bits, as integers; symmetric: times half the levels

  /// @param heads  rotated queries of this warp's four heads
  __device__ __forceinline__ void load(const float (*heads)[T::kHeadDim], float scale, int lane) {
    if constexpr (T::kExact) {
      unit = scale * kLog2e, exact_unit = 1.0f;
    } else {
      const int g = lane >> 2, t = lane & 3;
      const float* row = heads[g >> 1];
      float largest = 1e-20f;
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(row[32 * j + 8 * t + e]));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
      const float inverse = 32512.0f / largest;
      int sum[Side::kGroups] = {};
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          unsigned packed = 0;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int q = __float2int_rn(row[32 * j + 8 * t + 4 * w + i] * inverse);
            const int high = (q + 128) >> 8, low = q - 256 * high;
            sum[j / Side::kStepsInGroup] += q;
            packed |= static_cast<unsigned>((g & 1 ? low : high) & 255) << (8 * i);
          }
          fragment[j][w] = packed;
        }
#pragma unroll
      for (int j = 0; j < Side::kGroups; ++j) {
        sum[j] += __shfl_xor_sync(kAll, sum[j], 1);
        sum[j] += __shfl_xor_sync(kAll, sum[j], 2);
        // Up to here the lane held head g / 2, from here on head t.
        sums[j] = __shfl_sync(kAll, static_cast<float>(sum[j]), 8 * t) * static_cast<float>(1 << Side::kBits);
        if constexpr (!Side::kAffine) sums[j] *= 0.5f * Side::kLevels;
      }
      unit = __shfl_sync(kAll, largest, 8 * t) * (1.0f / 32512.0f / (1 << Side::kBits)) * scale * kLog2e;
      exact_unit = scale * kLog2e / unit;
    }
  }
};

/// Scores of a tile's tokens g and g + 8 for head t, in the query's unit.
template <typename T>
__device__ __forceinline__ void tile_scores(const unsigned char* tile, const Query<T>& query, int lane, float& score0,
                                            float& score1) {
  using Side = typename T::KSide;
  unsigned words[2 * Side::kWords];
  load_words<Side>(tile, lane, words);
  float scores[2] = {0.0f, 0.0f};
#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    int sums[2][4] = {};
    bool used[2] = {false, false};
#pragma unroll
    for (int j = group * Side::kStepsInGroup; j < (group + 1) * Side::kStepsInGroup; ++j) {
      const Step<Side> step(j);
      const bool split = step.slice0 != step.slice1;
      const unsigned a0 = slice_of<Side>(words[step.word0], step.slice0),
                     a1 = slice_of<Side>(words[Side::kWords + step.word0], step.slice0);
      unsigned a2 = slice_of<Side>(words[step.word1], step.slice1),
               a3 = slice_of<Side>(words[Side::kWords + step.word1], step.slice1);
      if (split) a2 >>= Side::kBits, a3 >>= Side::kBits;
      const int kind = split ? 0 : step.slice0 % 2;  // codes, or codes times 2^bits
      used[kind] = true;
      ptx::mma_m16n8k32_u8s8(sums[kind], a0, a1, a2, a3, query.fragment[j][0], query.fragment[j][1]);
    }
    const Numbers<Side> numbers(tile, group, lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int product = 0;
      if (used[0]) product += (sums[0][2 * i] * 256 + sums[0][2 * i + 1]) << Side::kBits;
      if (used[1]) product += sums[1][2 * i] * 256 + sums[1][2 * i + 1];
      if constexpr (Side::kAffine)
        scores[i] =
            fmaf(numbers.scale[i], static_cast<float>(product), fmaf(numbers.minimum[i], query.sums[group], scores[i]));
      else
        scores[i] = fmaf(numbers.scale[i], static_cast<float>(product) - query.sums[group], scores[i]);
    }
  }
  score0 = scores[0], score1 = scores[1];
}

/// Attends to one stage of coded tokens.
/// @param first       position of the stage's first token
/// @param begin, end  visible positions
template <typename T>
__device__ __forceinline__ void attend_coded(const unsigned char* stage, int first, int begin, int end,
                                             const Query<T>& query, State<T>& state, int lane) {
  using Side = typename T::VSide;
  constexpr int kTiles = T::kStageTiles;
  constexpr float kLargest = 65534.0f;  // of 16 bits, with room for the error of its reciprocal
  const int g = lane >> 2;
  const unsigned char* values = stage + T::kValuesAt;

  float scores[2 * kTiles];
#pragma unroll
  for (int u = 0; u < kTiles; ++u)
    tile_scores<T>(stage + u * T::KSide::side().bytes(), query, lane, scores[2 * u], scores[2 * u + 1]);
  unsigned hidden = 0;  // bit j: token 8 j + g
  if (first < begin || first + T::kStageTokens > end) {
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j)
      if (first + 8 * j + g < begin || first + 8 * j + g >= end) hidden |= 1u << j, scores[j] = kMinusInf;
    asm volatile("" ::: "memory");  // a branch: rarely taken
  }
  float stage_max = scores[0];
#pragma unroll
  for (int j = 1; j < 2 * kTiles; ++j) stage_max = fmaxf(stage_max, scores[j]);
  const float reference = state.rescale(stage_max, query.unit);
#pragma unroll
  for (int j = 0; j < 2 * kTiles; ++j) {
    scores[j] = ptx::ex2(fmaf(scores[j], query.unit, -reference));
    state.sum += scores[j];
  }

  unsigned words[kTiles][2 * Side::kWords];
#pragma unroll
  for (int u = 0; u < kTiles; ++u) load_words<Side>(values + u * Side::side().bytes(), lane, words[u]);

#pragma unroll
  for (int group = 0; group < Side::kGroups; ++group) {
    float weights[2 * kTiles], minima[2 * kTiles], largest = 0.0f;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const Numbers<Side> numbers(values + u * Side::side().bytes(), group, g);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        weights[2 * u + i] = numbers.scale[i] * scores[2 * u + i], minima[2 * u + i] = numbers.minimum[i];
    }
    if (__any_sync(kAll, hidden)) {  // what lies beyond the sequence may be anything, not a number included
#pragma unroll
      for (int j = 0; j < 2 * kTiles; ++j)
        if (hidden >> j & 1) weights[j] = minima[j] = 0.0f;
      asm volatile("" ::: "memory");
    }
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) {
      state.minima[group] =
          Side::kAffine ? fmaf(scores[j], minima[j], state.minima[group]) : state.minima[group] + weights[j];
      largest = fmaxf(largest, weights[j]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 4));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 8));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 16));
    largest = fmaxf(largest, 1e-30f);
    const float inverse = __fdividef(kLargest, largest), unit = largest * (1.0f / kLargest);

    // Sixteen-bit integers in the low bits of floats, cut into bytes: pieces of four tokens.
    unsigned columns[kTiles];
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __float_as_uint(fmaf(weights[4 * pair + i], inverse, 8388608.0f));
      const unsigned p01 = __byte_perm(x[0], x[1], 0x5140), p23 = __byte_perm(x[2], x[3], 0x5140);
      unsigned even, odd;
      exchange(__byte_perm(p01, p23, 0x7632), __byte_perm(p01, p23, 0x5410), lane, even, odd);
      columns[2 * pair] = __byte_perm(even, odd, 0x5410);
      columns[2 * pair + 1] = __byte_perm(even, odd, 0x7632);
    }
    // Codes of a slice are only masked, so they come times a power of 2.
    float units[Side::kPerByte];
#pragma unroll
    for (int i = 0; i < Side::kPerByte; ++i) units[i] = unit * (1.0f / (1 << (i * Side::kBits)));
    constexpr auto masked = [](unsigned word, int slice) { return word & (Side::kMask << (slice * Side::kBits)); };
#pragma unroll
    for (int block = 0; block < T::kBlocks; ++block) {
      if (value_step(Side::side(), block) / Side::kStepsInGroup != group) continue;
      const int h = block / Side::kPerByte, slice = block % Side::kPerByte;
      int sums[4] = {};
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair)
        ptx::mma_m16n8k32_u8u8(sums, masked(words[2 * pair][2 * h], slice), masked(words[2 * pair][2 * h + 1], slice),
                               masked(words[2 * pair + 1][2 * h], slice), masked(words[2 * pair + 1][2 * h + 1], slice),
                               columns[2 * pair], columns[2 * pair + 1]);
      state.out[block][0] = fmaf(static_cast<float>(sums[0] * 256 + sums[1]), units[slice], state.out[block][0]);
      state.out[block][1] = fmaf(static_cast<float>(sums[2] * 256 + sums[3]), units[slice], state.out[block][1]);
    }
  }
}

// ---- 4. Exact stages: eight tokens in bfloat16 -------------------------------------------------------------------

/// One of the two bfloat16 halves of x, whose sum has 16 bits; `part` 0 is the high one.
__device__ __forceinline__ unsigned half_of(float x, int part) {
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  return __bfloat16_as_ushort(part == 0 ? high : __float2bfloat16_rn(x - __bfloat162float(high)));
}

template <typename T>
__device__ __forceinline__ void attend_exact(const unsigned char* stage, int first, int begin, int end,
                                             const unsigned (&fragments)[T::kBlocks][2][32], const Query<T>& query,
                                             State<T>& state, int lane) {
  const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, row = lane & 7;
  const unsigned keys = ptx::shared_address(stage), values = keys + T::kExactBytes;
  float sums[2][4] = {};
#pragma unroll
  for (int pair = 0; pair < T::kBlocks / 2; ++pair) {
    unsigned a[4];
    ptx::ldmatrix_x4(a, keys + static_cast<unsigned>(exact_offset(T::kHeadDim, row, (4 * pair + matrix) * 8)));
    ptx::mma_m16n8k16_bf16(sums[0], a[0], 0, a[1], 0, fragments[2 * pair][0][lane], fragments[2 * pair][1][lane]);
    ptx::mma_m16n8k16_bf16(sums[1], a[2], 0, a[3], 0, fragments[2 * pair + 1][0][lane],
                           fragments[2 * pair + 1][1][lane]);
  }
  const bool visible = first + g >= begin && first + g < end;
  const float score = visible ? ((sums[0][0] + sums[1][0]) + (sums[0][1] + sums[1][1])) * query.exact_unit : kMinusInf;
  const float reference = state.rescale(score, query.unit);
  const float weight = ptx::ex2(fmaf(score, query.unit, -reference));
  state.sum += weight;
  unsigned even, odd;
  exchange(half_of(weight, 0), half_of(weight, 1), lane, even, odd);
  const unsigned column = __byte_perm(even, odd, 0x5410);
  const int position = first + 2 * t;
  unsigned mask = ~0u;
  if (first < begin || first + T::kExactTokens > end)
    mask = (position >= begin && position < end ? 0xFFFFu : 0u) |
           (position + 1 >= begin && position + 1 < end ? 0xFFFF0000u : 0u);
#pragma unroll
  for (int pair = 0; pair < T::kBlocks / 2; ++pair) {
    unsigned a[4];
    ptx::ldmatrix_x4_trans(a, values + static_cast<unsigned>(exact_offset(T::kHeadDim, row, (4 * pair + matrix) * 8)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float c[4] = {};
      ptx::mma_m16n8k8_bf16(c, a[2 * i] & mask, a[2 * i + 1] & mask, column);
      state.out[2 * pair + i][0] += c[0] + c[1];
      state.out[2 * pair + i][1] += c[2] + c[3];
    }
  }
}

// ---- 5. Rotations of queries and results, by the whole block -----------------------------------------------------

/// rows @ rotation in place; rows [kHeads, D]. `transposed`: a block Hadamard the other way (a dense matrix is stored
/// as needed).
template <typename T>
__device__ __forceinline__ void rotate(typename T::Shared& shared, const DeviceRotation& rotation, int head,
                                       bool transposed) {
  constexpr int kDim = T::kHeadDim, kQuads = kDim / 4;
  float (&rows)[T::kHeads][kDim] = shared.record.value;
  const int entry = rotation.per_head ? head : 0, thread = static_cast<int>(threadIdx.x);
  if (rotation.matrix) {
    // Each thread takes four columns and a part of the inner dimension; the parts meet in `merged`.
    constexpr int kParts = T::kThreads / kQuads > 4 ? 4 : T::kThreads / kQuads, kEach = kDim / kParts,
                  kBatch = kEach % 16 == 0 ? 16 : 8;
    static_assert(kParts >= 1 && kEach % kBatch == 0);
    const float4* matrix =
        reinterpret_cast<const float4*>(rotation.matrix + static_cast<std::int64_t>(entry) * kDim * kDim);
    const int quad = thread % kQuads, part = thread / kQuads;
    for (int base = 0; base < T::kHeads; base += 4) {
      float4 sums[4] = {};
      if (part < kParts) {
#pragma unroll 1
        for (int k = part * kEach; k < (part + 1) * kEach; k += kBatch) {
          float4 m[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) m[i] = __ldg(matrix + (k + i) * kQuads + quad);
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const float x = rows[base + r][k + i];
              sums[r].x = fmaf(x, m[i].x, sums[r].x), sums[r].y = fmaf(x, m[i].y, sums[r].y);
              sums[r].z = fmaf(x, m[i].z, sums[r].z), sums[r].w = fmaf(x, m[i].w, sums[r].w);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float* to = &shared.merged[part][r][quad * 4];
          to[0] = sums[r].x, to[1] = sums[r].y, to[2] = sums[r].z, to[3] = sums[r].w;
        }
      }
      sync<T>();
      for (int i = thread; i < 4 * kDim; i += T::kThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kParts; ++n) sum += shared.merged[n][i / kDim][i % kDim];
        rows[base + i / kDim][i % kDim] = sum;
      }
      sync<T>();
    }
  } else if (rotation.order > 1) {
    const std::int8_t* signs = rotation.signs ? rotation.signs + entry * kDim : nullptr;
    constexpr int kTotal = T::kHeads * kDim;
    if (signs && !transposed) {
      for (int i = thread; i < kTotal; i += T::kThreads)
        rows[i / kDim][i % kDim] *= static_cast<float>(signs[i % kDim]);
      sync<T>();
    }
    for (int half = 1; half < rotation.order; half *= 2) {
      for (int i = thread; i < kTotal / 2; i += T::kThreads) {
        const int r = i / (kDim / 2), x = i % (kDim / 2), at = (x & ~(half - 1)) * 2 + (x & (half - 1));
        const float a = rows[r][at], b = rows[r][at + half];
        rows[r][at] = a + b;
        rows[r][at + half] = a - b;
      }
      sync<T>();
    }
    const float scale = rsqrtf(static_cast<float>(rotation.order));
    for (int i = thread; i < kTotal; i += T::kThreads)
      rows[i / kDim][i % kDim] *= signs && transposed ? scale * static_cast<float>(signs[i % kDim]) : scale;
    sync<T>();
  }
}

// ---- 6. Merging partial results ----------------------------------------------------------------------------------

/// Adds `count` records; by all threads. Leaves values, largest score and sum in the block's own record, which may be
/// one of them.
/// @param state_of   (record, head) -> float2
/// @param values_of  (record, float4 of values) -> float4
template <typename T, typename StateOf, typename ValuesOf>
__device__ __forceinline__ void merge_records(typename T::Shared& shared, int count, StateOf state_of,
                                              ValuesOf values_of) {
  constexpr int kQuads = T::kHeads * T::kHeadDim / 4, kEach = (kQuads + T::kThreads - 1) / T::kThreads;
  const int thread = static_cast<int>(threadIdx.x);
  float4 values[kEach];
  float max[kEach], sum[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) values[e] = make_float4(0, 0, 0, 0), max[e] = kMinusInf, sum[e] = 0.0f;
  for (int base = 0; base < count; base += T::kTable) {
    const int n = min(count - base, T::kTable);
    for (int i = thread; i < n * T::kHeads; i += T::kThreads)
      shared.table[i / T::kHeads][i % T::kHeads] = state_of(base + i / T::kHeads, i % T::kHeads);
    sync<T>();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int quad = thread + e * T::kThreads, head = quad / (T::kHeadDim / 4);
      if (quad >= kQuads) continue;
      float larger = max[e];
#pragma unroll 8
      for (int r = 0; r < n; ++r) larger = fmaxf(larger, shared.table[r][head].x);
      if (larger == kMinusInf) continue;
      const float keep = ptx::ex2(max[e] - larger);
      values[e].x *= keep, values[e].y *= keep, values[e].z *= keep, values[e].w *= keep, sum[e] *= keep;
      max[e] = larger;
#pragma unroll 16
      for (int r = 0; r < n; ++r) {
        const float2 state = shared.table[r][head];
        const float4 v = values_of(base + r, quad);
        const float factor = ptx::ex2(state.x - larger);
        if (state.x == kMinusInf) continue;  // its values may be anything
        values[e].x = fmaf(factor, v.x, values[e].x), values[e].y = fmaf(factor, v.y, values[e].y);
        values[e].z = fmaf(factor, v.z, values[e].z), values[e].w = fmaf(factor, v.w, values[e].w);
        sum[e] = fmaf(factor, state.y, sum[e]);
      }
    }
    sync<T>();
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int quad = thread + e * T::kThreads, head = quad / (T::kHeadDim / 4);
    if (quad >= kQuads) continue;
    reinterpret_cast<float4*>(shared.record.value)[quad] = values[e];
    if (quad % (T::kHeadDim / 4) == 0) shared.record.state[head] = make_float2(max[e], sum[e]);
  }
  sync<T>();
}

/// The result of an item from its merged record: divided by the sum, rotated back.
template <typename T>
__device__ __forceinline__ void finish(const DecodeParams& p, typename T::Shared& shared,
                                       const typename T::Item& item) {
  using Activation = typename T::Activation;
  constexpr int kDim = T::kHeadDim;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int group_heads = p.num_q_heads / p.num_kv_heads;
  for (int head = warp; head < group_heads; head += T::kWarps) {
    const int query_head = item.head * group_heads + head;
    float shift = 0.0f;  // q . center, the same for every key: the softmax does not see it, LSE and sink logits do
    if (p.center_k && (p.lse || p.sink_logits)) {
      const Activation* q = static_cast<const Activation*>(p.q) + item.sequence * p.q_stride + query_head * kDim;
      for (int c = lane; c < kDim; c += 32) shift = fmaf(to_float(q[c]), p.center_k[item.head * kDim + c], shift);
      for (int step = 1; step < 32; step *= 2) shift += __shfl_xor_sync(kAll, shift, step);
      shift *= p.softmax_scale * kLog2e;
    }
    const float2 merged = shared.record.state[head];
    const float sum = merged.y + (p.sink_logits ? exp2f(p.sink_logits[query_head] * kLog2e - shift - merged.x) : 0.0f);
    const float inverse = 1.0f / sum;
    for (int c = lane; c < kDim; c += 32) shared.record.value[head][c] *= inverse;
    if (p.lse && lane == 0)
      p.lse[static_cast<std::int64_t>(item.sequence) * p.num_q_heads + query_head] =
          (merged.x + shift + log2f(sum)) * kLn2;
  }
  sync<T>();
  rotate<T>(shared, p.rotation_v, item.head, true);
  Activation* out = static_cast<Activation*>(p.out) + item.sequence * p.out_stride + item.head * group_heads * kDim;
  for (int i = thread; i < group_heads * kDim; i += T::kThreads)
    from_float(shared.record.value[i / kDim][i % kDim] + (p.center_v ? p.center_v[item.head * kDim + i % kDim] : 0.0f),
               out[i]);
  sync<T>();
}

// ---- 7. The kernel -----------------------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(T::kBlockThreads, T::kMinBlocks)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using Activation = typename T::Activation;
  using Record = typename T::Record;
  using Side = typename T::VSide;
  constexpr int kDim = T::kHeadDim;
  extern __shared__ __align__(128) unsigned char memory[];
  typename T::Shared& shared = *reinterpret_cast<typename T::Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;

  // 7.1 The line, and who does what.
  if (thread < T::kItems) ptx::mbarrier_init(ptx::shared_address(&shared.left[thread]), T::kWarps);
  if (thread < T::kStages) {
    ptx::mbarrier_init(ptx::shared_address(&shared.full[thread]), kFullArrivals);
    ptx::mbarrier_init(ptx::shared_address(&shared.empty[thread]), T::kTeam);
#if __CUDA_ARCH__ >= 900
    ptx::fence_mbarrier_init();
#endif
  }
  const int blocks = static_cast<int>(gridDim.x);
  survey<T>(p, shared, static_cast<int>(blockIdx.x), blocks);

  // Sequences without a visible token have no slots.
  for (int b = static_cast<int>(blockIdx.x); b < p.batch; b += blocks)
    if (p.seq_lens[b] <= 0) {
      for (int i = thread; i < p.num_q_heads * kDim; i += T::kBlockThreads)
        from_float(0.0f, static_cast<Activation*>(p.out)[b * p.out_stride + i]);
      if (p.lse)
        for (int i = thread; i < p.num_q_heads; i += T::kBlockThreads)
          p.lse[static_cast<std::int64_t>(b) * p.num_q_heads + i] = p.sink_logits ? p.sink_logits[i] : kMinusInf;
    }
  const Cut cut(shared.total, blocks);
  if (static_cast<int>(blockIdx.x) >= cut.pieces) return;
  if (warp == T::kWarps) {
    Loader<T>{p, shared, lane}.run(cut);
    return;
  }

  const int team = warp / T::kTeam, member = warp % T::kTeam;
  const int group_heads = p.num_q_heads / p.num_kv_heads;
  Query<T> query;
  State<T> state;
  int stage = team;
  unsigned parity = 0;
  for (;;) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
    const typename T::StageInfo info = shared.info[stage];
    if (info.flags & kStageEnd) return;
    const auto release = [&] {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
      stage += T::kTeams;
      if (stage >= T::kStages) stage -= T::kStages, parity ^= 1;
    };

    // 7.2 All partial results of an item are there: merge and finish it.
    if (info.flags & kStageMerge) {
      const typename T::Item item = shared.merges[info.flags >> kStageItemShift];
      const auto record_of = [&](int r) {
        return reinterpret_cast<const Record*>(p.partials) + 2 * static_cast<std::int64_t>(item.first_piece + r) +
               (r == 0);
      };
      merge_records<T>(
          shared, item.last_piece - item.first_piece + 1,
          [&](int r, int head) { return __ldcg(&record_of(r)->state[head]); },
          [&](int r, int quad) { return __ldcg(reinterpret_cast<const float4*>(record_of(r)->value) + quad); });
      finish<T>(p, shared, item);
      release();
      continue;
    }

    // 7.3 A new item's queries: rotated, as operands.
    if (info.flags & kStageFirst) {
      const int label = info.flags >> kStageItemShift;
      const Activation* q = reinterpret_cast<const Activation*>(shared.raw_q[label]);
      sync<T>();  // they came with the first stage, which the first team waited for
      for (int i = thread; i < T::kHeads * kDim; i += T::kThreads)
        shared.record.value[i / kDim][i % kDim] = i / kDim < group_heads ? to_float(q[i]) : 0.0f;
      sync<T>();
      rotate<T>(shared, p.rotation_k, shared.items[label].head, false);
      for (int i = thread; i < T::kTeam * T::kBlocks * 64; i += T::kThreads) {
        const int l = i % 32, half = i / 32 % 2, block = i / 64 % T::kBlocks, m = i / 64 / T::kBlocks;
        const float* row = shared.record.value[4 * m + (l >> 3)];
        const int channel = 16 * block + 8 * half + 2 * (l & 3), part = l >> 2 & 1;
        shared.exact_q[m][block][half][l] = half_of(row[channel], part) | half_of(row[channel + 1], part) << 16;
      }
      query.load(&shared.record.value[4 * member], p.softmax_scale, lane);
      state.reset();
      sync<T>();
    }

    // 7.4 A stage of tokens.
    if (!T::kExact && (info.flags & kStageCoded)) {
      if constexpr (!T::kExact)
        attend_coded<T>(shared.stages[stage], info.first, info.begin, info.end, query, state, lane);
    } else if (info.flags & kStageExact) {
      attend_exact<T>(shared.stages[stage], info.first, info.begin, info.end, shared.exact_q[member], query, state,
                      lane);
    }
    release();
    if (!(info.flags & kStageLast)) continue;

    // 7.5 The item's end, or the end of this block's part: merge the warps. Heads of member m are in the warps m, m +
    // kTeam, ...
    const typename T::Item item = shared.items[info.flags >> kStageItemShift];
    {
      const int g = lane >> 2, t = lane & 3;
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.sum += __shfl_xor_sync(kAll, state.sum, step);
#pragma unroll
        for (float& m : state.minima) m += __shfl_xor_sync(kAll, m, step);
      }
#pragma unroll
      for (int block = 0; block < T::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float value = state.out[block][i];
          if constexpr (!T::kExact)
            value += (Side::kAffine ? 1.0f : -0.5f * Side::kLevels) *
                     state.minima[value_step(Side::side(), block) / Side::kStepsInGroup];
          shared.merged[warp][t][value_channel(Side::side(), 16 * block + 8 * i + g)] = value;
        }
      if (g == 0) shared.merged_state[warp][t] = make_float2(state.max * query.unit, state.sum);
    }
    sync<T>();
    Record& record = item.record >= 0 ? reinterpret_cast<Record*>(p.partials)[item.record] : shared.record;
    for (int i = thread; i < T::kHeads * kDim; i += T::kThreads) {
      const int head = i / kDim, channel = i % kDim;
      float max = kMinusInf, value = 0.0f, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < T::kTeams; ++w) max = fmaxf(max, shared.merged_state[w * T::kTeam + head / 4][head % 4].x);
#pragma unroll
      for (int w = 0; w < T::kTeams; ++w) {
        const float2 theirs = shared.merged_state[w * T::kTeam + head / 4][head % 4];
        const float factor = theirs.x == kMinusInf ? 0.0f : ptx::ex2(theirs.x - max);
        value = fmaf(factor, shared.merged[w * T::kTeam + head / 4][head % 4][channel], value);
        sum = fmaf(factor, theirs.y, sum);
      }
      record.value[head][channel] = value;
      if (channel == 0) record.state[head] = make_float2(max, sum);
    }
    if (item.record >= 0) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.left[info.flags >> kStageItemShift]));
    } else {
      sync<T>();
      finish<T>(p, shared, item);
    }
  }
}

}  // namespace kvq::decode
