#pragma once

#include <kvq/runtime/kernels/decode/rotate.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

#include <type_traits>

/// The combine kernel: merges the partial results of each item (work tile) by their softmax states, rotates the sum
/// back and divides it. Its blocks start where blocks of the decode kernel have ended, and load the rotation. They poll
/// each item's completion counter instead of waiting for the whole decode grid. They are scheduled after all decode
/// blocks (programmatic dependent launch), so every producer they wait for is already resident: no deadlock.
namespace kvq::decode {

/// Base-2 logarithm of a power of two.
__device__ __forceinline__ int log2_of(int x) { return 31 - __clz(x); }

/// What a block combines at once: some query heads of one KV head, of some sequences. Each (sequence, query head) is a
/// row: the heads of the first sequence, of the second...
struct Unit {
  int head, first_sequence, first_head, sequences, heads;

  __device__ __forceinline__ int rows() const { return sequences * heads; }
};

/// How items are divided into units. If items are few, each query head is a unit, so that all blocks have work. If they
/// are many, a unit has all heads of one sequence, or of several. But items at the end of a line of several rounds may
/// have many partial results, and they are complete last: there a unit has a quarter of an item's heads. If the
/// completion counter then shows few partial results, the item's first unit takes all heads and the others are empty.
struct Units {
  int sequences_each, heads_each;  ///< of a unit before the end; powers of two
  int splits;                      ///< units of an item before the end
  int before_end;                  ///< units of a KV head before the end
  int end, end_sequences;          ///< first sequence of the end, number of sequences
  int end_splits;                  ///< units of an item at the end

  /// Units of a KV head.
  __host__ __device__ int count() const { return before_end + end_sequences * end_splits; }
};

/// Shared memory of a block that combines.
template <typename T>
struct CombineShared {
  static constexpr int kRows = T::kHeadDim <= 128 ? 16 : T::kHeads;  ///< rows that are rotated at once
  static constexpr int kTiles = (kRows + 7) / 8;
  static constexpr int kEndHeads = T::kHeads / 4;  ///< heads of a unit at the end
  /// Partial results of a row that a warp loads at once. 17, which would be enough for almost all items, were slower.
  static constexpr int kBatch = T::kHeadDim <= 128 ? 9 : 6;
  /// Partial results of an item that a block loads at once if it has all heads.
  static constexpr int kAtOnce = kBatch * (T::kHeads < kSideWarps ? kSideWarps / T::kHeads : 1);
  alignas(16) PaddedRow<T::kHeadDim> rows[8 * kTiles];
  alignas(16) float4 part_values[kSideWarps][T::kHeadDim / 4];
  float2 part_states[kSideWarps];
  Arrivals arrivals[kRows / T::kHeads];
  float2 weights[kRows];                                           ///< weigh() of each row
  float shifts[kRows];                                             ///< center_score() of each row
  alignas(16) typename DenseRotation<T::kHeadDim>::Held rotation;  ///< allocated for dense rotations only
};

/// The partial results of an item, in the order of its parts: part 0 in a shared or a whole record, each later part in
/// the first shared record of its piece.
template <typename T>
struct Records {
  int count;
  const typename T::Record* first;
  const typename T::Record* others;  ///< part r > 0 is others[2 r]

  __device__ __forceinline__ Records(const DecodeParams& p, int decode_blocks, int item, const Arrivals& arrivals)
      : count(arrivals.parts()) {
    const auto* all = static_cast<const typename T::Record*>(p.partials);
    first = all + record_of(decode_blocks, Part{item, arrivals.first_piece(), true, count == 1});
    others = all + shared_record(arrivals.first_piece(), false);
  }
  __device__ __forceinline__ const typename T::Record& operator[](int part) const {
    return part == 0 ? *first : others[2 * part];
  }
};

/// LSE merge of the partial results of each row of a unit. One warp merges a row; if there are fewer rows than warps,
/// several warps share the row's partial results. Stores values in `rows` and weights in `weights`.
/// @param records_of  item of the unit -> its Records
/// @param weigh       (row, reference of the exponentials and sum) -> weight
template <typename T, typename RecordsOf, typename Weigh>
__device__ __forceinline__ void add_up(CombineShared<T>& shared, const Unit& unit, RecordsOf records_of, Weigh weigh) {
  constexpr int kQuads = T::kHeadDim / 4, kTurns = (kQuads + 31) / 32;  // four channels each; quads of a lane
  constexpr int kBatch = CombineShared<T>::kBatch;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int n = unit.rows(), at_once = min(n, kSideWarps), splits = kSideWarps >> log2_of(at_once);
  const int split = warp >> log2_of(at_once);  // all counts are powers of two
  const auto has = [&](int turn) { return kQuads % 32 == 0 || lane + 32 * turn < kQuads; };
#pragma unroll 1
  for (int base = 0; base < n; base += at_once) {
    const int row = base + (warp & (at_once - 1)), head = unit.first_head + (row & (unit.heads - 1));
    const Records<T> records = records_of(row >> log2_of(unit.heads));
    float max = kMinusInf, sum = 0.0f;  // the sum: of this lane's parts only
    float4 values[kTurns] = {};
#pragma unroll 1
    for (int first = split; first < records.count; first += splits * kBatch) {
      const int here = (records.count - first + splits - 1) >> log2_of(splits);
      float2 state = make_float2(kMinusInf, 0.0f);  // lane i has the state of the batch's part i
      if (lane < min(here, kBatch)) state = __ldcg(&records[first + lane * splits].state[head]);
      // Only the first part of the batch may be part 0 of the item.
      const auto values_of = [&](const typename T::Record& record) {
        return reinterpret_cast<const std::byte*>(record.value[head]) + lane * 16;
      };
      const std::byte *zeroth = values_of(records[first]), *others = values_of(records.others[2 * first]);
      const unsigned apart = static_cast<unsigned>(2 * splits * static_cast<int>(sizeof(typename T::Record)));
      float4 v[kBatch][kTurns];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= here) break;
        const auto* from =
            reinterpret_cast<const float4*>(i == 0 ? zeroth : others + ptx::mul_wide(apart, static_cast<unsigned>(i)));
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
          if (has(turn)) v[i][turn] = __ldcg(from + 32 * turn);
      }
      // Here, not above, because the ballot waits for `state` and would delay the loads of values. The values of parts
      // without tokens are undefined.
      const unsigned with_tokens = __ballot_sync(kAll, state.x != kMinusInf);
      float larger = fmaxf(max, state.x);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) larger = fmaxf(larger, __shfl_xor_sync(kAll, larger, step));
      if (larger == kMinusInf) continue;
      const float keep = ptx::ex2(max - larger), factor = ptx::ex2(state.x - larger);  // 0 for -inf
      max = larger, sum = fmaf(sum, keep, with_tokens >> lane & 1 ? factor * state.y : 0.0f);
#pragma unroll
      for (float4& x : values) x.x *= keep, x.y *= keep, x.z *= keep, x.w *= keep;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= here) break;
        const float f = __shfl_sync(kAll, factor, i);
        if (!(with_tokens >> i & 1)) continue;
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) add_scaled(values[turn], f, v[i][turn]);
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (splits > 1) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        if (has(turn)) shared.part_values[warp][lane + 32 * turn] = values[turn];
      if (lane == 0) shared.part_states[warp] = make_float2(max, sum);
      __syncthreads();
      if (split == 0) {
        float2 state[kSideWarps];
#pragma unroll
        for (int s = 0; s < kSideWarps; ++s) {
          state[s] = s < splits ? shared.part_states[row + s * at_once] : make_float2(kMinusInf, 0.0f);
          max = fmaxf(max, state[s].x);
        }
        sum = 0.0f;
#pragma unroll
        for (float4& x : values) x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < kSideWarps; ++s) {
          if (state[s].x == kMinusInf) continue;
          const float f = ptx::ex2(state[s].x - max);
          sum = fmaf(f, state[s].y, sum);
#pragma unroll
          for (int turn = 0; turn < kTurns; ++turn)
            if (has(turn)) add_scaled(values[turn], f, shared.part_values[row + s * at_once][lane + 32 * turn]);
        }
      }
    }
    if (split == 0) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        if (has(turn)) reinterpret_cast<float4*>(shared.rows[row])[lane + 32 * turn] = values[turn];
      if (lane == 0) shared.weights[row] = weigh(row, make_float2(max, sum));
    }
  }
  __syncthreads();
}

/// q . center of a query head, as a base-2 score. It is the same for every key, so it cancels in the softmax, but LSE
/// and sink logits need it. All lanes of one warp call it.
template <typename T>
__device__ __forceinline__ float center_score(const DecodeParams& p, int sequence, int head, int query_head, int lane) {
  const typename T::Activation* q =
      static_cast<const typename T::Activation*>(p.q) + sequence * p.q_stride + query_head * T::kHeadDim;
  const float* center = p.center_k + head * T::kHeadDim;
  float score = 0.0f;
#pragma unroll 1
  for (int c = lane; c < T::kHeadDim; c += 32) score = fmaf(to_float(__ldcg(q + c)), center[c], score);
  for (int step = 1; step < 32; step *= 2) score += __shfl_xor_sync(kAll, score, step);
  return score * (p.softmax_scale * kLog2e);
}

/// The factor of a row's merged values, and the tokens' fraction of the softmax sum: 1 without a learned sink. Stores
/// the row's LSE. One thread calls it.
/// @param state  reference of the exponentials, sum
/// @param shift  center_score()
__device__ __forceinline__ float2 weigh(const DecodeParams& p, int sequence, int query_head, float2 state,
                                        float shift) {
  float reference = state.x, factor = 1.0f, sum = state.y;
  if (p.sink_logits) {
    const float sink = p.sink_logits[query_head] * kLog2e - shift;
    reference = fmaxf(state.x, sink);  // a learned sink may be far above all scores
    factor = state.x == kMinusInf ? 0.0f : exp2f(state.x - reference);
    sum = fmaf(state.y, factor, sink == kMinusInf ? 0.0f : exp2f(sink - reference));
  }
  const bool any = reference > kMinusInf;  // there is a token or a sink
  if (p.lse)
    p.lse[static_cast<std::int64_t>(sequence) * p.num_q_heads + query_head] =
        any ? (reference + shift + log2f(sum)) * kLn2 : kMinusInf;
  const float weight = any ? factor * ptx::rcp_approx(sum) : 0.0f;
  return make_float2(weight, p.sink_logits ? state.y * weight : any ? 1.0f : 0.0f);
}

/// Grid: any number of blocks; if there are more units than blocks, a multiple of the KV heads.
template <typename T>
__global__ void __maxnreg__(kSideRegisters<T::kHeadDim>)
    combine_kernel(const __grid_constant__ DecodeParams p, int decode_blocks, const Units units) {
  using Activation = typename T::Activation;
  constexpr int kDim = T::kHeadDim, kTiles = CombineShared<T>::kTiles;
  extern __shared__ __align__(128) unsigned char memory[];
  CombineShared<T>& shared = *reinterpret_cast<CombineShared<T>*>(memory);
  auto& rows = shared.rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int group_heads = p.num_q_heads / p.num_kv_heads, count = units.count() * p.num_kv_heads;

  ptx::griddepcontrol_launch_dependents();
  DenseRotation<kDim> dense{shared.rotation};
  for (int number = static_cast<int>(blockIdx.x); number < count; number += static_cast<int>(gridDim.x)) {
    const int head = number % p.num_kv_heads, rest = number / p.num_kv_heads, at_end = rest - units.before_end;
    Unit unit = {head, 0, 0, units.sequences_each, units.heads_each};
    if (at_end < 0) {
      unit.first_sequence = rest / units.splits * units.sequences_each;
      unit.first_head = rest % units.splits * units.heads_each;
    } else {
      unit.first_sequence = units.end + at_end % units.end_sequences;
      unit.first_head = at_end / units.end_sequences * CombineShared<T>::kEndHeads;
      unit.sequences = 1, unit.heads = unit.first_head == 0 ? T::kHeads : CombineShared<T>::kEndHeads;
    }
    // A unit at the end may turn out to be empty; it loads no rotation until it knows that it is not.
    const bool certain = unit.first_head == 0 || at_end < 0;
    if (p.rotation_v.matrix && certain) dense.open(p.rotation_v, unit.head);
    // Rows of padding heads are merged and rotated with the others, but not stored.
    const auto sequence_of = [&](int row) { return unit.first_sequence + (row >> log2_of(unit.heads)); };
    const auto head_of = [&](int row) { return unit.first_head + (row & (unit.heads - 1)); };
    const auto query_head_of = [&](int row) { return unit.head * group_heads + head_of(row); };
    const auto is_row = [&](int row) { return head_of(row) < group_heads; };
    LaneRow<kDim> factors;
    load_factors<kDim>(p.rotation_v, unit.head, lane, factors);
    const bool shifted = p.center_k && (p.lse || p.sink_logits);
    if (shifted) {
#pragma unroll 1
      for (int row = warp; row < unit.rows(); row += kSideWarps) {
        if (!is_row(row)) continue;
        const float shift = center_score<T>(p, sequence_of(row), unit.head, query_head_of(row), lane);
        if (lane == 0) shared.shifts[row] = shift;
      }
    }
    const auto item_of = [&](int i) { return (unit.first_sequence + i) * p.num_kv_heads + unit.head; };
    // One polling thread for each sequence: more of them were slower, because they contend with the decode blocks'
    // atomics on the same word.
    if (thread < unit.sequences) {
      Arrivals now;
      while (now.bits = ptx::ld_acquire(p.arrivals + item_of(thread)), !now.complete()) __nanosleep(40);
      shared.arrivals[thread] = now;
    }
    __syncthreads();
    if (at_end >= 0) {
      if (shared.arrivals[0].parts() > CombineShared<T>::kAtOnce) {
        unit.heads = CombineShared<T>::kEndHeads;
        if (p.rotation_v.matrix && !certain) dense.open(p.rotation_v, unit.head);
      } else if (!certain) {
        __syncthreads();
        continue;
      }
    }
    add_up<T>(
        shared, unit, [&](int i) { return Records<T>(p, decode_blocks, item_of(i), shared.arrivals[i]); },
        [&](int row, float2 state) {
          return is_row(row)
                     ? weigh(p, sequence_of(row), query_head_of(row), state, shifted ? shared.shifts[row] : 0.0f)
                     : float2{};
        });

    const auto out_of = [&](int row) {
      return static_cast<Activation*>(p.out) + sequence_of(row) * p.out_stride +
             static_cast<std::int64_t>(query_head_of(row)) * kDim;
    };
    const auto finished = [&](int row, int channel, float x) {
      const float center = p.center_v ? p.center_v[unit.head * kDim + channel] : 0.0f;
      return fmaf(shared.weights[row].y, center, x * shared.weights[row].x);
    };
    if (p.rotation_v.matrix) {
      const auto rotate = [&](auto tiles) {
        typename DenseRotation<kDim>::template Product<tiles.value> product;
        dense.template multiply<tiles.value>(rows, product);
        dense.template for_each<tiles.value>(product, [&](int row, int channel, float2 two) {
          if (row >= unit.rows() || !is_row(row)) return;
          Activation* out = out_of(row) + channel;
          from_float(finished(row, channel, two.x), out[0]), from_float(finished(row, channel + 1, two.y), out[1]);
        });
      };
      if (kTiles == 1 || unit.rows() <= 8)
        rotate(std::integral_constant<int, 1>{});
      else
        rotate(std::integral_constant<int, kTiles>{});
    } else {
#pragma unroll 1
      for (int row = warp; row < unit.rows(); row += kSideWarps) {
        if (!is_row(row)) continue;
        LaneRow<kDim> x;
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) x[j] = rows[row][lane + 32 * j];
        if (p.rotation_v.order >= 1) {
          transform<kDim>(x, p.rotation_v.order, lane);
          const float scale = rsqrtf(static_cast<float>(p.rotation_v.order));
#pragma unroll
          for (int j = 0; j < kDim / 32; ++j) x[j] *= scale;
          multiply<kDim>(x, factors);
        }
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) from_float(finished(row, lane + 32 * j, x[j]), out_of(row)[lane + 32 * j]);
      }
    }
    __syncthreads();
  }
  ptx::griddepcontrol_wait();  // kernels that wait for this grid rely on the grids before it having ended, too
}

}  // namespace kvq::decode
