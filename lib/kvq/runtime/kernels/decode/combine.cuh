#pragma once

#include <kvq/runtime/kernels/common/softmax_state.h>
#include <kvq/runtime/kernels/decode/combine.h>
#include <kvq/runtime/kernels/decode/center_score.cuh>
#include <kvq/runtime/kernels/decode/passes.cuh>
#include <kvq/runtime/kernels/decode/rotate.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>

#include <type_traits>

/// The combine kernel: merges the partial results of each work tile by their softmax states, rotates the sum
/// back and divides it. Its blocks start where blocks of the decode kernel have ended, and load the rotation. They poll
/// each work tile's completion counter instead of waiting for the whole decode grid. They are scheduled after all
/// decode blocks (programmatic dependent launch), so every producer they wait for is already resident: no deadlock.
namespace kvq::decode {

/// Base-2 logarithm of a power of two.
__device__ __forceinline__ int log2_of(int x) { return 31 - __clz(x); }

/// What a block combines at once: some rows of some work tiles of one KV head, which are those of neighboring passes.
struct CombineUnit {
  int head, first_pass, first_row, passes, rows_each;

  __device__ __forceinline__ int rows() const { return passes * rows_each; }
};

/// A row of the result.
struct OutputRow {
  std::int64_t token;  ///< row of q, out and lse
  int query_head;
  bool exists;  ///< else padding
};
__device__ __forceinline__ OutputRow output_row(const DecodeKernelParams& p, int pass, int head, int row) {
  const int heads = p.heads_per_kv_head;
  const Row at = row_of(p, pass, row);
  if (!p.q_indptr) return {sequence_of(p, pass), head * heads + at.head, at.exists(p, 1)};
  const Pass of = load_pass(p, pass);
  return {of.first_row + at.query, head * heads + at.head, at.exists(p, of.queries.count)};
}

/// Shared memory of a block that combines.
template <typename T>
struct CombineShared {
  using Rotation = DenseRotation<T::kHeadDim>;
  static constexpr int kRowTiles = (T::kRows + 7) / 8;
  alignas(16) PaddedRow<T::kHeadDim> rows[8 * kRowTiles];
  alignas(16) float4 partial_values[kRotateWarps][T::kHeadDim / 4];
  float2 partial_states[kRotateWarps];
  CompletionCounter completions[T::kRows / T::kHeads];
  OutputRow outputs[T::kRows];                   ///< of each row
  float2 weights[T::kRows];                      ///< weigh() of each row
  float shifts[T::kRows];                        ///< center_score() of each row
  alignas(16) typename Rotation::Held rotation;  ///< allocated for dense rotations only
};

/// The partial results of a work tile, in the order of its splits: the first one in a cut entry or in the work tile's
/// own, each later one in the first cut entry of its split.
template <typename T>
struct Partials {
  int count;
  const typename T::Partial* first;
  const typename T::Partial* others;  ///< partial result r > 0 is others[2 r]

  __device__ __forceinline__ Partials(const DecodeKernelParams& p, int decode_blocks, int work_tile,
                                      const CompletionCounter& counter)
      : count(counter.partials()) {
    const auto* all = static_cast<const typename T::Partial*>(p.partials);
    first = all + partial_index(decode_blocks, PartialId{work_tile, counter.first_split(), true, count == 1});
    others = all + cut_partial(counter.first_split(), false);
  }
  __device__ __forceinline__ const typename T::Partial& operator[](int r) const {
    return r == 0 ? *first : others[2 * r];
  }
};

/// LSE merge of the partial results of each row of a unit. One warp merges a row; if there are fewer rows than warps,
/// several warps share the row's partial results. Stores values in `rows` and weights in `weights`.
/// @param partials_of  number of a pass in the unit -> the Partials of its work tile
/// @param weigh        (row, reference of the exponentials and sum) -> weight
template <typename T, typename PartialsOf, typename Weigh>
__device__ __forceinline__ void merge_partials(CombineShared<T>& shared, const CombineUnit& unit,
                                               PartialsOf partials_of, Weigh weigh) {
  constexpr int kQuads = T::kHeadDim / 4, kTurns = (kQuads + 31) / 32;  // four channels each; quads of a lane
  constexpr int kBatch = T::kBatch;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int n = unit.rows(), at_once = min(n, kRotateWarps), row_warps = kRotateWarps >> log2_of(at_once);
  const int row_warp = warp >> log2_of(at_once);  // all counts are powers of two
  const auto has = [&](int turn) { return kQuads % 32 == 0 || lane + 32 * turn < kQuads; };
#pragma unroll 1
  for (int base = 0; base < n; base += at_once) {
    const int row = base + (warp & (at_once - 1)), row_of_tile = unit.first_row + (row & (unit.rows_each - 1));
    const Partials<T> partials = partials_of(row >> log2_of(unit.rows_each));
    float reference = kMinusInf, sum = 0.0f;  // the sum: of this lane's partial results only
    float4 values[kTurns] = {};
#pragma unroll 1
    for (int first = row_warp; first < partials.count; first += row_warps * kBatch) {
      // Partial results for this warp, of this batch and later ones.
      const int remaining = (partials.count - first + row_warps - 1) >> log2_of(row_warps);
      float2 state = make_float2(kMinusInf, 0.0f);  // lane i has the state of the batch's partial result i
      if (lane < min(remaining, kBatch)) state = __ldcg(&partials[first + lane * row_warps].state[row_of_tile]);
      // Only the first partial result of the batch may be the work tile's first one.
      const auto values_of = [&](const typename T::Partial& partial) {
        return reinterpret_cast<const std::byte*>(partial.value[row_of_tile]) + lane * 16;
      };
      const std::byte *zeroth = values_of(partials[first]), *others = values_of(partials.others[2 * first]);
      const unsigned stride = static_cast<unsigned>(2 * row_warps * static_cast<int>(sizeof(typename T::Partial)));
      float4 v[kBatch][kTurns];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= remaining) break;
        const auto* from =
            reinterpret_cast<const float4*>(i == 0 ? zeroth : others + ptx::mul_wide(stride, static_cast<unsigned>(i)));
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
          if (has(turn)) v[i][turn] = __ldcg(from + 32 * turn);
      }
      // Here, not above, because the ballot waits for `state` and would delay the loads of values. Partial results
      // whose scores are all -inf, and lanes without a partial result, do not count.
      const unsigned with_scores = __ballot_sync(kAll, state.x != kMinusInf);
      float larger = fmaxf(reference, state.x);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) larger = fmaxf(larger, __shfl_xor_sync(kAll, larger, step));
      if (larger == kMinusInf) continue;
      const float keep = ptx::ex2(reference - larger), factor = ptx::ex2(state.x - larger);  // 0 for -inf
      reference = larger, sum = fmaf(sum, keep, with_scores >> lane & 1 ? factor * state.y : 0.0f);
#pragma unroll
      for (float4& x : values) x.x *= keep, x.y *= keep, x.z *= keep, x.w *= keep;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i >= remaining) break;
        const float f = __shfl_sync(kAll, factor, i);
        if (!(with_scores >> i & 1)) continue;
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) add_scaled(values[turn], f, v[i][turn]);
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (row_warps > 1) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        if (has(turn)) shared.partial_values[warp][lane + 32 * turn] = values[turn];
      if (lane == 0) shared.partial_states[warp] = make_float2(reference, sum);
      __syncthreads();
      if (row_warp == 0) {
        SoftmaxState state[kRotateWarps], merged;
#pragma unroll
        for (int s = 0; s < kRotateWarps; ++s) {
          if (s < row_warps) {
            const float2 theirs = shared.partial_states[row + s * at_once];
            state[s] = {theirs.x, theirs.y};
          }
          merged.raise(state[s].max);
        }
#pragma unroll
        for (float4& x : values) x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < kRotateWarps; ++s) {
          if (state[s].empty()) continue;
          const float f = merged.add(state[s], ptx::ex2);
#pragma unroll
          for (int turn = 0; turn < kTurns; ++turn)
            if (has(turn)) add_scaled(values[turn], f, shared.partial_values[row + s * at_once][lane + 32 * turn]);
        }
        reference = merged.max, sum = merged.sum;
      }
    }
    if (row_warp == 0) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        if (has(turn)) reinterpret_cast<float4*>(shared.rows[row])[lane + 32 * turn] = values[turn];
      if (lane == 0) shared.weights[row] = weigh(row, make_float2(reference, sum));
    }
  }
  __syncthreads();
}

/// The factor of a row's merged values, and the tokens' fraction of the softmax sum: 1 without a learned sink. Stores
/// the row's LSE. One thread calls it.
/// @param state  reference of the exponentials, sum
/// @param shift  center_score()
__device__ __forceinline__ float2 weigh(const DecodeKernelParams& p, const OutputRow& row, float2 state, float shift) {
  float reference = state.x, factor = 1.0f, sum = state.y;
  if (p.sink_logits) {
    const float sink = p.sink_logits[row.query_head] * kLog2e - shift;
    reference = fmaxf(state.x, sink);  // a learned sink may be far above all scores
    factor = state.x == kMinusInf ? 0.0f : exp2f(state.x - reference);
    sum = fmaf(state.y, factor, sink == kMinusInf ? 0.0f : exp2f(sink - reference));
  }
  const bool any = reference > kMinusInf;  // there is a token or a sink
  if (p.lse)
    p.lse[row.token * p.num_q_heads + row.query_head] = any ? (reference + shift + log2f(sum)) * kLn2 : kMinusInf;
  const float weight = any ? factor * ptx::rcp_approx(sum) : 0.0f;
  return make_float2(weight, p.sink_logits ? state.y * weight : any ? 1.0f : 0.0f);
}

/// Grid: any number of blocks. If there are more units than blocks, make_decode_grids() takes a multiple of the KV
/// heads, so that each block opens one rotation only; the kernel does not need that.
template <typename T>
__global__ void __maxnreg__(kRotateRegisters<T>)
    combine_kernel(const __grid_constant__ DecodeKernelParams p, int decode_blocks, const CombineSchedule units) {
  using Activation = typename T::Activation;
  constexpr int kDim = T::kHeadDim, kRowTiles = CombineShared<T>::kRowTiles;
  extern __shared__ __align__(128) unsigned char memory[];
  CombineShared<T>& shared = *reinterpret_cast<CombineShared<T>*>(memory);
  auto& rows = shared.rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int count = units.count() * p.cache.num_kv_heads;

  ptx::griddepcontrol_launch_dependents();
  ptx::fetch_params(p);
  typename CombineShared<T>::Rotation dense{shared.rotation};
  for (int number = static_cast<int>(blockIdx.x); number < count; number += static_cast<int>(gridDim.x)) {
    const int head = number % p.cache.num_kv_heads, rest = number / p.cache.num_kv_heads,
              tail_index = rest - units.units_before_tail;
    CombineUnit unit = {head, 0, 0, units.unit_passes, units.unit_rows};
    if (tail_index < 0) {
      unit.first_pass = rest / units.tile_units * units.unit_passes;
      unit.first_row = rest % units.tile_units * units.unit_rows;
    } else {
      unit.first_pass = units.tail_begin + tail_index % units.tail_passes;
      unit.first_row = tail_index / units.tail_passes * T::kTailRows;
      unit.passes = 1, unit.rows_each = unit.first_row == 0 ? T::kHeads : T::kTailRows;
    }
    // A unit of the tail may turn out to be empty; it loads no rotation until it knows that it is not.
    const bool certain = unit.first_row == 0 || tail_index < 0;
    if (p.cache.rotation_v.matrix && certain) dense.open(p.cache.rotation_v, unit.head);
    // Rows of padding are merged and rotated with the others, but not stored.
    if (thread < unit.rows())
      shared.outputs[thread] = output_row(p, unit.first_pass + (thread >> log2_of(unit.rows_each)), unit.head,
                                          unit.first_row + (thread & (unit.rows_each - 1)));
    LaneRow<kDim> factors;
    load_factors<kDim>(p.cache.rotation_v, unit.head, lane, factors);
    const bool shifted = p.cache.center_k && (p.lse || p.sink_logits) && !(p.logit_softcap > 0.0f);
    if (shifted) {
      __syncthreads();
#pragma unroll 1
      for (int row = warp; row < unit.rows(); row += kRotateWarps) {
        const OutputRow& to = shared.outputs[row];
        if (!to.exists) continue;
        const float shift = center_score<T>(p, to.token, unit.head, to.query_head, lane);
        if (lane == 0) shared.shifts[row] = shift;
      }
    }
    const auto work_tile_of = [&](int i) { return (unit.first_pass + i) * p.cache.num_kv_heads + unit.head; };
    // One polling thread for each pass: more of them were slower, because they contend with the decode blocks'
    // atomics on the same word.
    if (thread < unit.passes) {
      CompletionCounter now;
      while (now.bits = ptx::ld_acquire(p.completions + work_tile_of(thread)), !now.complete())
        __nanosleep(T::kPolicy.poll_nanoseconds);
      shared.completions[thread] = now;
    }
    __syncthreads();
    if (tail_index >= 0) {
      if (shared.completions[0].partials() > T::kPartialsAtOnce) {
        unit.rows_each = T::kTailRows;
        if (p.cache.rotation_v.matrix && !certain) dense.open(p.cache.rotation_v, unit.head);
      } else if (!certain) {
        __syncthreads();
        continue;
      }
    }
    merge_partials<T>(
        shared, unit, [&](int i) { return Partials<T>(p, decode_blocks, work_tile_of(i), shared.completions[i]); },
        [&](int row, float2 state) {
          if (shared.completions[row >> log2_of(unit.rows_each)].bits == CompletionCounter::kFaulty)
            state = make_float2(0.0f, kNaN);
          const OutputRow& to = shared.outputs[row];
          return to.exists ? weigh(p, to, state, shifted ? shared.shifts[row] : 0.0f) : float2{};
        });

    const auto out_of = [&](const OutputRow& to) {
      return static_cast<Activation*>(p.out) + to.token * p.out_stride +
             static_cast<std::int64_t>(to.query_head) * kDim;
    };
    const auto finished = [&](int row, int channel, float x) {
      const float center = p.cache.center_v ? p.cache.center_v[unit.head * kDim + channel] : 0.0f;
      return fmaf(shared.weights[row].y, center, x * shared.weights[row].x);
    };
    if (p.cache.rotation_v.matrix) {
      const auto rotate = [&](auto tiles) {
        typename CombineShared<T>::Rotation::template Product<tiles.value> product;
        dense.template multiply<tiles.value>(rows, product);
        dense.template for_each<tiles.value>(product, [&](int row, int channel, float2 two) {
          if (row >= unit.rows()) return;
          const OutputRow& to = shared.outputs[row];
          if (!to.exists) return;
          Activation* out = out_of(to) + channel;
          from_float(finished(row, channel, two.x), out[0]), from_float(finished(row, channel + 1, two.y), out[1]);
        });
      };
      if (kRowTiles == 1 || unit.rows() <= 8)
        rotate(std::integral_constant<int, 1>{});
      else
        rotate(std::integral_constant<int, kRowTiles>{});
    } else {
#pragma unroll 1
      for (int row = warp; row < unit.rows(); row += kRotateWarps) {
        const OutputRow& to = shared.outputs[row];
        if (!to.exists) continue;
        LaneRow<kDim> x;
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) x[j] = rows[row][lane + 32 * j];
        if (p.cache.rotation_v.order >= 1) {
          transform<kDim>(x, p.cache.rotation_v.order, lane);
          const float scale = rsqrtf(static_cast<float>(p.cache.rotation_v.order));
#pragma unroll
          for (int j = 0; j < kDim / 32; ++j) x[j] *= scale;
          multiply<kDim>(x, factors);
        }
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) from_float(finished(row, lane + 32 * j, x[j]), out_of(to)[lane + 32 * j]);
      }
    }
    __syncthreads();
  }
  // A later grid that waits for this one assumes that the two kernels before have ended as well, so this block must not
  // end before they have.
  ptx::griddepcontrol_wait();
}

}  // namespace kvq::decode
