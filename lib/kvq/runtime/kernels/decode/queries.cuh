#pragma once

#include <kvq/runtime/kernels/decode/center_score.cuh>
#include <kvq/runtime/kernels/decode/centroids.cuh>
#include <kvq/runtime/kernels/decode/linear_rows.cuh>
#include <kvq/runtime/kernels/decode/rotate.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/stages.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// The queries kernel, before decode: rotates the queries and cuts them into operands of the tensor cores. A kernel of
/// its own, because several decode blocks may share a work tile, and each would rotate the same queries again.
/// It also resets the work counter and the completion counters.
namespace kvq::decode {

/// The largest 16-bit integer of a query: its high byte, rounded, is at most 127.
constexpr float kLargestQuery = 127 * 256;

/// Cuts four rotated query rows into 16-bit integers, high and low bytes. All lanes of one warp call it.
/// @param rows  of the work tile
/// @param four  which four of them
template <typename T>
__device__ __forceinline__ void cut_queries(const PaddedRow<T::kHeadDim>* rows, float softmax_scale, int four, int lane,
                                            typename T::Operand& to) {
  using Side = typename T::KSide;
  if constexpr (T::kExact) {
    if (lane < 4) {
      const int row = T::row_of(four, lane);
      to.score_scale[row] = softmax_scale * kLog2e, to.exact_score_ratio[row] = 1.0f;
    }
  } else {
    static_assert(Side::kGroup * kLargestQuery * Side::kLevels * (1 << Side::kBits) < 0x1p31f,
                  "integer products of a group (four_rows.cuh)");
    constexpr int kSteps = T::kSteps;
    const int g = lane >> 2, t = lane & 3;
    const int row = T::row_of(four, g >> 1);
    const float* channels = rows[row];
    const auto values_of = [&](int j, int w) {
      return *reinterpret_cast<const float4*>(channels + 32 * j + 8 * t + 4 * w);
    };
    // Magnitudes as integers, in which infinity and NaN are the largest.
    unsigned most = __float_as_uint(1e-20f);
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const float4 x = values_of(j, w);
        for (const float y : {x.x, x.y, x.z, x.w}) most = max(most, __float_as_uint(fabsf(y)));
      }
    most = max(most, __shfl_xor_sync(kAll, most, 1));
    most = max(most, __shfl_xor_sync(kAll, most, 2));
    const float largest = __uint_as_float(most), inverse = kLargestQuery / largest;
    int sum[Side::kGroups] = {};
    for (int group = 0; group < Side::kGroups; ++group)
#pragma unroll 1  // a short loop is faster, because its instructions are fetched for the first time
      for (int j = group * Side::kStepsInGroup; j < (group + 1) * Side::kStepsInGroup; ++j)
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          unsigned packed = 0;
          const float4 x = values_of(j, w);
          const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int q = __float2int_rn(values[i] * inverse);
            const int high = (q + 128) >> 8, low = q - 256 * high;
            sum[group] += q;
            packed |= static_cast<unsigned>((g & 1 ? low : high) & 255) << (8 * i);
          }
          to.fragments[j][four / 2][lane][four % 2 * 2 + w] = packed;
        }
    const bool writes = t == 0 && g % 2 == 0;  // the eight lanes of a row hold the same sums
#pragma unroll
    for (int j = 0; j < Side::kGroups; ++j) {
      sum[j] += __shfl_xor_sync(kAll, sum[j], 1);
      sum[j] += __shfl_xor_sync(kAll, sum[j], 2);
      const float factor = static_cast<float>(T::kProductUnit) * (Side::kAffine ? 1.0f : 0.5f * Side::kLevels);
      if (writes) to.sums[j][row] = static_cast<float>(sum[j]) * factor;
    }
    float score_scale = largest * (1.0f / kLargestQuery / T::kProductUnit) * softmax_scale * kLog2e;
    if (most >= 0x7F800000u) score_scale = kNaN;  // so that every score is NaN
    if (writes) to.score_scale[row] = score_scale, to.exact_score_ratio[row] = softmax_scale * kLog2e / score_scale;
  }
}

/// An element of Theta that is not 0 (LinearTaps).
struct LinearTap {
  float weight;
  int source;
};
/// The taps of one head's keys: the first ones in shared memory, as many as trellises of memory 3 have, others in
/// global memory.
template <typename T>
struct HeldTaps {
  static constexpr int kMost = T::KSide::kSegments ? 1 : 4, kBits = 32 * T::KSide::kWords;
  struct Held {
    alignas(16) float weights[kMost][kBits];
    alignas(16) std::uint16_t sources[kMost][kBits];
  };
  Held& held;
  LinearTaps opened = {};  ///< of the head

  __device__ __forceinline__ int count() const { return opened.count; }
  /// Starts copies of a head's taps, unless they are open already. All threads of the block call it.
  /// @param entry  of the head in `all`
  __device__ __forceinline__ void open(const LinearTaps& all, int entry) {
    const std::int64_t first = std::int64_t{entry} * all.count * kBits;
    if (opened.weights == all.weights + first) return;
    opened = {all.weights + first, all.sources + first, all.count};
    const int elements = min(kMost, opened.count) * kBits;
    for (int i = static_cast<int>(threadIdx.x); i < elements / 4; i += kRotateThreads)
      ptx::cp_async_16(ptx::shared_address(&held.weights[0][4 * i]), opened.weights + 4 * i);
    for (int i = static_cast<int>(threadIdx.x); i < elements / 8; i += kRotateThreads)
      ptx::cp_async_16(ptx::shared_address(&held.sources[0][8 * i]), opened.sources + 8 * i);
  }
  __device__ __forceinline__ LinearTap operator()(int tap, int bit) const {
    if (tap < kMost) return {held.weights[tap][bit], held.sources[tap][bit]};
    return {__ldg(opened.weights + tap * kBits + bit), __ldg(opened.sources + tap * kBits + bit)};
  }
};
struct NoTaps {
  struct Held {};
  Held& held;
};
template <typename T>
using TapsOf = std::conditional_t<T::KSide::kLinear || T::KSide::kSegments, HeldTaps<T>, NoTaps>;

/// Cuts a query for keys in bit tiles into integers of T::kPlanes bits, in two's complement, and writes the bits of
/// half of its words, plane by plane. All lanes of one warp call it; two warps, or one twice, for each row.
/// @param values    numbers of the query for the lane's bit of each word that keys are multiplied by
/// @param row       of the work tile
/// @param half      which half of each chunk of words
template <typename T, int kWords>
__device__ __forceinline__ void cut_words(const float (&values)[kWords], float softmax_scale, int row, int half,
                                          int lane, typename T::Operand& to) {
  using Side = typename T::KSide;
  constexpr float kLargest = (1 << (T::kPlanes - 1)) - 1;
  constexpr int kPlanePairs = T::kPlanes / 2;
  unsigned most = __float_as_uint(1e-20f);  // magnitudes as integers, in which infinity and NaN are the largest
#pragma unroll
  for (int w = 0; w < kWords; ++w) most = max(most, __float_as_uint(fabsf(values[w])));
  for (int step = 1; step < 32; step *= 2) most = max(most, __shfl_xor_sync(kAll, most, step));
  const float largest = __uint_as_float(most), inverse = kLargest / largest;
  int sum = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) sum += __float2int_rn(values[w] * inverse);
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
  // Lane l keeps plane l of each word. A lane of the product has two words of a chunk (is_long()). Its column is one of
  // two planes of one row.
#pragma unroll
  for (int c = 0; c < Side::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i / 4 != half) continue;
      const int word = 8 * c + i;
      unsigned bits = 0;
      if (word < kWords) {
        const int q = __float2int_rn(values[word < kWords ? word : 0] * inverse);
#pragma unroll
        for (int plane = 0; plane < T::kPlanes; ++plane) {
          const unsigned all = __ballot_sync(kAll, q >> plane & 1);
          if (lane == plane) bits = all;
        }
      }
      const int t = Side::is_long(c) ? i / 2 : i % 4, column = 2 * (row % 4) + lane % 2;
      if (lane < T::kPlanes)
        to.fragments[c * kPlanePairs + lane / 2][row / 4][4 * column + t][Side::is_long(c) ? i % 2 : i / 4] = bits;
    }
  }
  float score_scale = largest * (1.0f / kLargest) * softmax_scale * kLog2e;
  if (most >= 0x7F800000u) score_scale = kNaN;  // so that every score is NaN
  if (lane == 0 && half == 0) {
    to.sums[0][row] = 0.5f * kTinyUnit * static_cast<float>(sum);
    to.score_scale[row] = score_scale, to.exact_score_ratio[row] = softmax_scale * kLog2e / score_scale;
  }
}

/// Cuts a query for keys of mixed widths into 16-bit integers, high and low bytes. All lanes of one warp call it.
/// @param values  numbers of the query for channel `lane` of each unit
/// @param row     of the work tile
template <typename T, int kUnits>
__device__ __forceinline__ void cut_units(const float (&values)[kUnits], float softmax_scale, int row, int lane,
                                          typename T::Operand& to) {
  unsigned most = __float_as_uint(1e-20f);  // magnitudes as integers, in which infinity and NaN are the largest
#pragma unroll
  for (const float value : values) most = max(most, __float_as_uint(fabsf(value)));
  for (int step = 1; step < 32; step *= 2) most = max(most, __shfl_xor_sync(kAll, most, step));
  const float largest = __uint_as_float(most), inverse = kLargestQuery / largest;
  // Lane t of a product has the channels 4 n + t: n = 0..3 are the bytes of its first word, 4..7 of the second one.
  const int t = lane % 4, byte = lane / 4 % 4, word = lane / 16;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    const int q = __float2int_rn(values[unit] * inverse);
    const int high = (q + 128) >> 8, low = q - 256 * high;
#pragma unroll
    for (int part = 0; part < 2; ++part)
      reinterpret_cast<std::int8_t*>(&to.fragments[unit][row / 4][4 * (2 * (row % 4) + part) + t][word])[byte] =
          static_cast<std::int8_t>(part ? low : high);
  }
  float score_scale = largest * (1.0f / kLargestQuery) * softmax_scale * kLog2e;
  if (most >= 0x7F800000u) score_scale = kNaN;  // so that every score is NaN
  if (lane == 0) to.score_scale[row] = score_scale, to.exact_score_ratio[row] = softmax_scale * kLog2e / score_scale;
}

/// The numbers of a query for bits of keys: Theta^T times its channels; or for channels of units, as SegmentRows say.
/// @param channels  [D] of the rotated query
/// @param taps      of the keys' head
template <typename T>
__device__ __forceinline__ void query_of_bits(const float* channels, const HeldTaps<T>& taps, int lane,
                                              float (&values)[T::KSide::kWords]) {
#pragma unroll
  for (float& value : values) value = 0.0f;
#pragma unroll 2
  for (int tap = 0; tap < taps.count(); ++tap)
#pragma unroll
    for (int w = 0; w < T::KSide::kWords; ++w) {
      const LinearTap at = taps(tap, 32 * w + lane);
      values[w] = fmaf(at.weight, channels[at.source], values[w]);
    }
}
/// Likewise for keys of codebook codes of one width: words have x of one odd set of 32 channels (table_layout.h).
/// @param weights  [kSets] of the keys' head
template <typename T>
__device__ __forceinline__ void query_of_sets(const float* channels, const float* weights, int lane,
                                              float (&values)[T::KSide::kWords]) {
#pragma unroll
  for (int w = 0; w < T::KSide::kWords; ++w) {
    const TableWord word = table_word(T::KSide::kBits, w);
    values[w] = channels[kUnitChannels * word.unit + lane] * __ldg(weights + word.set);
  }
}

/// Copies a table of a KV head. All lanes of one warp call it. @tparam From  a plain struct, aligned to 16
template <typename From>
__device__ __forceinline__ void copy_table(const From& from, int lane, From& to) {
  static_assert(sizeof(From) % 16 == 0);
#pragma unroll 4
  for (int i = lane; i < static_cast<int>(sizeof(From) / 16); i += 32)
    reinterpret_cast<uint4*>(&to)[i] = __ldg(reinterpret_cast<const uint4*>(&from) + i);
}

/// Shared memory of a block of the queries kernel.
template <typename T>
struct QueriesShared {
  static constexpr int kRows = 16;
  using Rotation = DenseRotation<T::kHeadDim>;
  alignas(16) PaddedRow<T::kHeadDim> rows[kRows];
  Pass passes[kRows];  ///< of each work tile
  typename TapsOf<T>::Held taps;
  typename Rotation::Held rotation;  ///< allocated for dense rotations only
};

/// Grid: any number of blocks; if there are more work tiles than blocks, a multiple of the KV heads (required). Then a
/// block has one KV head, and prepares the queries of several passes at once.
template <typename T>
__global__ void __maxnreg__(kRotateRegisters<T>) queries_kernel(const __grid_constant__ DecodeKernelParams p) {
  using Activation = typename T::Activation;
  constexpr int kDim = T::kHeadDim, kTilesAtOnce = QueriesShared<T>::kRows / T::kHeads;
  extern __shared__ __align__(128) unsigned char memory[];
  QueriesShared<T>& shared = *reinterpret_cast<QueriesShared<T>*>(memory);
  auto& rows = shared.rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int heads_per_kv_head = p.heads_per_kv_head, work_tiles = p.num_passes() * p.cache.num_kv_heads;
  const int grid = static_cast<int>(gridDim.x), head = static_cast<int>(blockIdx.x) % p.cache.num_kv_heads;
  ptx::fetch_params(p);
  typename QueriesShared<T>::Rotation dense{shared.rotation};
  TapsOf<T> taps{shared.taps};
  if constexpr (T::KSide::kLinear) taps.open(p.cache.rotation_k.taps, p.cache.rotation_k.per_head ? head : 0);
  if constexpr (T::KSide::kSegments) taps.open(p.cache.code_k.program_taps, head);
  if (p.cache.rotation_k.matrix) dense.open(p.cache.rotation_k, head);
  LaneRow<kDim> factors;
  load_factors<kDim>(p.cache.rotation_k, head, lane, factors);
  const float scale = rsqrtf(static_cast<float>(max(1, p.cache.rotation_k.order)));
  // After the wait, all earlier work of the stream has ended. Decode blocks can start only after it, so they may read
  // keys and values without waiting themselves.
  const auto wait_and_let_decode_start = [] {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
  };
  if (!p.inputs_final) wait_and_let_decode_start();
  if (blockIdx.x == 0 && thread == 0) *p.work_counter = 0;
  constexpr int kTurns = QueriesShared<T>::kRows / kRotateWarps;  // rows of a warp
  Activation fetched[kTurns][kDim / 32];
  // The first warps cut queries. Each warp behind them checks what the tables say of the sequence of one work tile,
  // which is first + check_warp * grid.
  constexpr int kCutters = kTilesAtOnce * T::kFours;
  static_assert(kCutters + kTilesAtOnce <= kRotateWarps);
  const int check_warp = warp - kCutters;
  const auto checks = [&](int n) { return check_warp >= 0 && check_warp < n; };
  const auto pass_of = [&](int work_tile) { return work_tile / p.cache.num_kv_heads; };
  SequenceEntry fetched_entry = {};
  const auto fetch = [&](int first) {
    const int n = min(kTilesAtOnce, (work_tiles - first + grid - 1) / grid);
    if (checks(n)) fetched_entry = load_entry(p.cache, sequence_of(p, pass_of(first + check_warp * grid)));
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = warp + turn * kRotateWarps, local_head = row % T::kHeads;  // in the work tile
      if (row >= n * T::kHeads) break;
      const int number = first / p.cache.num_kv_heads + row / T::kHeads * (grid / p.cache.num_kv_heads);
      const Row at = row_of(p, number, local_head);
      std::int64_t q_row = sequence_of(p, number);
      bool is_row = at.exists(p, 1);
      if (p.q_indptr) {
        const Pass pass = load_pass(p, number);
        q_row = pass.first_row + at.query, is_row = at.exists(p, pass.queries.count);
      }
      const Activation* q = static_cast<const Activation*>(p.q) + q_row * p.q_stride +
                            static_cast<std::int64_t>(head * heads_per_kv_head + at.head) * kDim + lane;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) fetched[turn][j] = is_row ? __ldcg(q + 32 * j) : Activation{};
    }
    return n;
  };
  int first = static_cast<int>(blockIdx.x);
  for (int n = fetch(first), next = 0; n > 0; first += kTilesAtOnce * grid, n = next) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row = warp + turn * kRotateWarps;
      if (row >= n * T::kHeads) break;
      LaneRow<kDim> x;
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) x[j] = to_float(fetched[turn][j]);
      if (p.cache.rotation_k.order >= 1 && !p.cache.rotation_k.matrix) {
        multiply<kDim>(x, factors);
        transform<kDim>(x, p.cache.rotation_k.order, lane);
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) x[j] *= scale;
      }
#pragma unroll
      for (int j = 0; j < kDim / 32; ++j) rows[row][lane + 32 * j] = x[j];
    }
    const int checked_tile = first + check_warp * grid;
    const SequenceEntry entry = fetched_entry;
    RingLook ring;  // looked at after the rotation, by when its loads have ended
    if (checks(n)) ring = load_ring(p.cache, sequence_of(p, pass_of(checked_tile)), entry.ring_slot);
    // The next queries are loaded now, because later these loads would queue behind those of the decode blocks.
    next = first + kTilesAtOnce * grid < work_tiles ? fetch(first + kTilesAtOnce * grid) : 0;
    if constexpr (T::KSide::kLinear || T::KSide::kSegments)
      ptx::cp_async_wait_all();  // the taps; the barrier publishes them
    __syncthreads();
    if (p.cache.rotation_k.matrix) {
      if (n * T::kHeads <= 8)
        dense.template apply<1>(rows);
      else
        dense.template apply<2>(rows);
    }
    // A sequence with a fault in its tables has no tokens. One with a fault of its ring has, and is attended to, with
    // scores that are all NaN: it is poisoned.
    bool poisoned = false;
    if (checks(n)) {
      const int number = pass_of(checked_tile);
      const Pass pass = check_pass(p, number, entry);
      const SequenceTokens& tokens = pass.checked.tokens;
      // Of several new tokens, or a range of positions, there may be none to attend to.
      const bool has_tokens =
          p.q_indptr || p.first || p.last ? chunks_of<T>(p, number, tokens).count > 0 : tokens.length > 0;
      const Fault of_ring = ring.fault(tokens), fault = pass.checked.fault ? pass.checked.fault : of_ring;
      poisoned = static_cast<bool>(of_ring);
      if (lane == 0) {
        p.completions[checked_tile] = pass.checked.fault ? CompletionCounter::kFaulty
                                      : has_tokens       ? 0
                                                         : CompletionCounter::kNone;
        if (head == 0 && fault) record_fault(p.cache.faults, fault, pass.sequence, p.cache.layer);
        shared.passes[check_warp] = pass;
      }
    }
    if (p.q_indptr || p.logit_softcap > 0.0f) __syncthreads();  // what follows reads shared.passes
    typename T::Operand* operands = static_cast<typename T::Operand*>(p.operands);
    // Where rows may differ, a warp that cuts no queries writes what they see.
    if (const int row = thread - (kRotateThreads - 32); p.q_indptr && row >= 0 && row < n * T::kHeads) {
      typename T::Operand& to = operands[first + row / T::kHeads * grid];
      const RowSight sight = sight_of(p, shared.passes[row / T::kHeads], row % T::kHeads / p.passes.heads);
      to.row_begin[row % T::kHeads] = sight.begin, to.row_mask[row % T::kHeads] = sight.mask;
      if (row % T::kHeads == 0) to.new_begin = sight.new_begin;
    }
    if (p.logit_softcap > 0.0f) {
#pragma unroll 1
      for (int row = warp; row < n * T::kHeads; row += kRotateWarps) {
        const Pass& pass = shared.passes[row / T::kHeads];
        const Row at = row_of(p, pass_of(first + row / T::kHeads * grid), row % T::kHeads);
        float score = 0.0f;
        if (p.cache.center_k && at.exists(p, pass.queries.count))
          score = center_score<T>(p, pass.first_row + at.query, head, head * heads_per_kv_head + at.head, lane);
        if (lane == 0) operands[first + row / T::kHeads * grid].center_scores[row % T::kHeads] = score;
      }
    }
    if constexpr (T::kBitTiles) {
      constexpr int kParts = T::KSide::kSegments ? 1 : 2;  // of a query, each for a warp
#pragma unroll 1
      for (int i = warp; i < kParts * n * T::kHeads; i += kRotateWarps) {
        const int row = i / kParts;
        typename T::Operand& to = operands[first + row / T::kHeads * grid];
        float values[T::KSide::kWords];
        if constexpr (T::KSide::kLinear || T::KSide::kSegments)
          query_of_bits<T>(rows[row], taps, lane, values);
        else
          query_of_sets<T>(rows[row], p.cache.code_k.weights + head * T::KSide::kSets, lane, values);
        if constexpr (T::KSide::kSegments)
          cut_units<T>(values, p.softmax_scale, row % T::kHeads, lane, to);
        else
          cut_words<T>(values, p.softmax_scale, row % T::kHeads, i % kParts, lane, to);
      }
      for (int i = warp; i < n; i += kRotateWarps) {
        typename T::Operand& to = operands[first + i * grid];
        if constexpr (T::KSide::kSegments) copy_table(p.cache.code_k.programs[head], lane, to.program);
        if constexpr (T::kTable) copy_table(p.cache.code_v.levels[head], lane, to.value_levels);
      }
    } else if (warp < n * T::kFours)
      cut_queries<T>(rows + warp / T::kFours * T::kHeads, p.softmax_scale, warp % T::kFours, lane,
                     operands[first + warp / T::kFours * grid]);
    // Pairs of words: the high parts of two channels, their low parts.
    constexpr int kRowPairs = T::kChannelBlocks * 8,
                  kBusy = T::kBitTiles ? 0 : 32 * kCutters;  // threads that cut queries
    for (int i = thread - kBusy; i >= 0 && i < n * T::kHeads * kRowPairs; i += kRotateThreads - kBusy) {
      const int row = i / 4 % T::kHeads, eight = i / 4 / T::kHeads % 2, block = i / 8 / T::kHeads % T::kChannelBlocks,
                tile = i / T::kHeads / kRowPairs, t = i % 4;
      const float2 x = *reinterpret_cast<const float2*>(&rows[tile * T::kHeads + row][16 * block + 8 * eight + 2 * t]);
      unsigned high, low;
      split_bf16(x.x, x.y, high, low);
      auto& to = operands[first + tile * grid].bf16_parts[block];
      if constexpr (T::kManyRows) {
        const int word = row / 8 * 2 + eight, l = row % 8 * 4 + t;
        to[0][l][word] = high, to[1][l][word] = low;
      } else {
        // Lane l = 8 h + t has column 2 h, the high parts of row h of four; lane l + 4 has column 2 h + 1, the low
        // ones.
        const int l = row % 4 * 8 + t;
        to[row / 4][l][eight] = high, to[row / 4][l + 4][eight] = low;
      }
    }
    if constexpr (T::kKeyCentroids) {
      __syncthreads();  // the operands have the scales of scores
      for (int tile = 0; tile < n; ++tile)
        score_centroids<T>(p.cache.code_k, head, rows + tile * T::kHeads, operands[first + tile * grid]);
    }
    __syncthreads();
    if (poisoned && lane < T::kHeads) operands[checked_tile].score_scale[lane] = kNaN;
  }
  if (p.inputs_final) wait_and_let_decode_start();
}

}  // namespace kvq::decode
