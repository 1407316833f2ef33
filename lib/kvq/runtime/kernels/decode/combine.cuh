#pragma once

#include <kvq/runtime/kernels/decode/rotate.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// Results, after decode: the partial results of an item added up, divided by their sum and rotated back. A kernel of
/// its own, whose blocks take the places of those of decode as they end, read the rotation, and take up each item when
/// its last part arrives, not when the last block of decode has ended. They come up only after all blocks of decode
/// have, so whom they wait for is at work.
namespace kvq::decode {

/// Of a power of two.
__device__ __forceinline__ int log2_of(int x) { return 31 - __clz(x); }

/// What a block combines at once: of a KV head some query heads, of some sequences. A row each: the heads of the first
/// sequence, of the second...
struct Unit {
  int head, first_sequence, first_head, sequences, heads;

  __device__ __forceinline__ int rows() const { return sequences * heads; }
};

/// Shared memory of a block that combines.
template <typename T>
struct CombineShared {
  static constexpr int kRows = T::kHeadDim <= 128 ? 16 : T::kHeads;  ///< that are rotated at once
  static constexpr int kTiles = (kRows + 7) / 8;
  alignas(16) PaddedRow<T::kHeadDim> rows[8 * kTiles];
  alignas(16) float4 part_values[kSideThreads];
  float2 part_states[kSideThreads], states[kRows];
  Arrivals arrivals[kRows / T::kHeads];
  alignas(16) typename DenseRotation<T::kHeadDim>::Held rotation;  ///< is there for dense ones
};

/// The rows of a unit: of each, the partial results of a query head added up. Leaves values in `rows`, the reference of
/// the exponentials and the sum in `states`.
/// @param record_of  (item of the unit, number of the partial result) -> partial result
template <typename T, typename RecordOf>
__device__ __forceinline__ void add_up(CombineShared<T>& shared, const Unit& unit, RecordOf record_of) {
  constexpr int kBatch = 9;  // loads on the way: as many as registers allow, since each round of them waits once
  constexpr int kQuads = T::kHeadDim / 4, kFit = kSideThreads / kQuads;
  constexpr int kAtOnce = kFit >= 16 ? 16 : kFit >= 8 ? 8 : 4;  // rows; all counts of rows are powers of two
  const int thread = static_cast<int>(threadIdx.x), quad = thread % kQuads, slot = thread / kQuads;
  const int n = unit.rows(), at_once = min(n, kAtOnce), splits = kAtOnce >> log2_of(at_once);
  const int split = slot >> log2_of(at_once);
#pragma unroll 1
  for (int base = 0; base < n; base += at_once) {
    const int row = base + (slot & (at_once - 1)), item = row >> log2_of(unit.heads);
    const int count = split < splits ? shared.arrivals[item].parts() : 0,
              head = unit.first_head + (row & (unit.heads - 1));
    float max = kMinusInf, sum = 0.0f;
    float4 values = make_float4(0, 0, 0, 0);
    for (int first = split; first < count; first += splits * kBatch) {
      float2 state[kBatch];
      float4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = first + i * splits;
        state[i] = make_float2(kMinusInf, 0.0f), v[i] = make_float4(0, 0, 0, 0);
        if (r < count) {
          const typename T::Record& record = record_of(item, r);
          state[i] = __ldcg(&record.state[head]);
          v[i] = __ldcg(reinterpret_cast<const float4*>(record.value[head]) + quad);
        }
      }
      float larger = max;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) larger = fmaxf(larger, state[i].x);
      if (larger == kMinusInf) continue;
      const float keep = ptx::ex2(max - larger);
      values.x *= keep, values.y *= keep, values.z *= keep, values.w *= keep, sum *= keep;
      max = larger;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (state[i].x == kMinusInf) continue;  // its values may be anything
        const float factor = ptx::ex2(state[i].x - larger);
        values.x = fmaf(factor, v[i].x, values.x), values.y = fmaf(factor, v[i].y, values.y);
        values.z = fmaf(factor, v[i].z, values.z), values.w = fmaf(factor, v[i].w, values.w);
        sum = fmaf(factor, state[i].y, sum);
      }
    }
    if (splits > 1) {
      shared.part_values[thread] = values, shared.part_states[thread] = make_float2(max, sum);
      __syncthreads();
      if (split == 0) {
        float2 state[kAtOnce];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          state[s] = s < splits ? shared.part_states[s * at_once * kQuads + thread] : make_float2(kMinusInf, 0.0f);
          max = fmaxf(max, state[s].x);
        }
        values = make_float4(0, 0, 0, 0), sum = 0.0f;
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
          const float factor = state[s].x == kMinusInf ? 0.0f : ptx::ex2(state[s].x - max);
          const float4 v = s < splits ? shared.part_values[s * at_once * kQuads + thread] : make_float4(0, 0, 0, 0);
          values.x = fmaf(factor, v.x, values.x), values.y = fmaf(factor, v.y, values.y);
          values.z = fmaf(factor, v.z, values.z), values.w = fmaf(factor, v.w, values.w);
          sum = fmaf(factor, state[s].y, sum);
        }
      }
    }
    if (split == 0) {
      reinterpret_cast<float4*>(shared.rows[row])[quad] = values;
      if (quad == 0) shared.states[row] = make_float2(max, sum);
    }
  }
  __syncthreads();
}

/// Divides a row by its sum, a learned sink included, and tells its LSE; by a warp.
/// @param state  the row's; its sum becomes the part of it that tokens have
template <typename T>
__device__ __forceinline__ void normalize(const DecodeParams& p, int sequence, int head, int query_head, float* row,
                                          float2& state, int lane) {
  float shift = 0.0f;  // q . center, the same for every key: the softmax does not see it, LSE and sink logits do
  if (p.center_k && (p.lse || p.sink_logits)) {
    const typename T::Activation* q =
        static_cast<const typename T::Activation*>(p.q) + sequence * p.q_stride + query_head * T::kHeadDim;
    const float* center = p.center_k + head * T::kHeadDim;
#pragma unroll 1
    for (int c = lane; c < T::kHeadDim; c += 32) shift = fmaf(to_float(__ldcg(q + c)), center[c], shift);
    for (int step = 1; step < 32; step *= 2) shift += __shfl_xor_sync(kAll, shift, step);
    shift *= p.softmax_scale * kLog2e;
  }
  const float sink = p.sink_logits ? p.sink_logits[query_head] * kLog2e - shift : kMinusInf;
  const float reference = fmaxf(state.x, sink);  // a learned sink may be far above all scores
  const bool any = reference > kMinusInf;        // a token, or a sink
  const float factor = any ? exp2f(state.x - reference) : 0.0f;
  const float tokens = state.y * factor, sum = tokens + (any ? exp2f(sink - reference) : 1.0f);
  const float inverse = factor / sum;
  for (int c = lane; c < T::kHeadDim; c += 32) row[c] *= inverse;
  __syncwarp();
  if (lane == 0) {
    state.y = tokens / sum;
    if (p.lse)
      p.lse[static_cast<std::int64_t>(sequence) * p.num_q_heads + query_head] =
          any ? (reference + shift + log2f(sum)) * kLn2 : kMinusInf;
  }
}

/// Grid: as many blocks as one likes, a multiple of the KV heads if there are more units than blocks.
/// @param sequences_each, heads_each  of a unit: several sequences with all heads, or one with all or one; powers of
/// two
template <typename T>
__global__ void __maxnreg__(kSideRegisters<T::kHeadDim>)
    combine_kernel(const __grid_constant__ DecodeParams p, int decode_blocks, int sequences_each, int heads_each) {
  using Activation = typename T::Activation;
  constexpr int kDim = T::kHeadDim, kTiles = CombineShared<T>::kTiles;
  extern __shared__ __align__(16) unsigned char memory[];
  CombineShared<T>& shared = *reinterpret_cast<CombineShared<T>*>(memory);
  auto& rows = shared.rows;
  auto& states = shared.states;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int group_heads = p.num_q_heads / p.num_kv_heads, splits = (group_heads + heads_each - 1) / heads_each;
  const int units = (p.batch + sequences_each - 1) / sequences_each * splits * p.num_kv_heads;

  ptx::griddepcontrol_launch_dependents();
  DenseRotation<kDim> dense{shared.rotation};
  for (int number = static_cast<int>(blockIdx.x); number < units; number += static_cast<int>(gridDim.x)) {
    const int head = number % p.num_kv_heads, rest = number / p.num_kv_heads;
    const Unit unit = {head, rest / splits * sequences_each, rest % splits * heads_each, sequences_each, heads_each};
    if (p.rotation_v.matrix) dense.open(p.rotation_v, unit.head);
    if (thread < sequences_each) {
      const int sequence = unit.first_sequence + thread;
      Arrivals now;
      if (sequence < p.batch)
        while (now.bits = ptx::ld_acquire(p.arrivals + sequence * p.num_kv_heads + unit.head),
               !now.complete(T::kTeams == 1 ? T::kWarps : 1))
          __nanosleep(40);
      shared.arrivals[thread] = now;
    }
    __syncthreads();
    add_up<T>(shared, unit, [&](int i, int r) -> const typename T::Record& {
      const int item = (unit.first_sequence + i) * p.num_kv_heads + unit.head;
      const Part part{item, shared.arrivals[i].first_piece() + r, r == 0, r == shared.arrivals[i].parts() - 1};
      return static_cast<const typename T::Record*>(p.partials)[record_of(decode_blocks, part)];
    });

    // Rows that are none, of idle heads or behind the last sequence, are rotated with the others and left alone else.
    const auto sequence_of = [&](int row) { return unit.first_sequence + (row >> log2_of(unit.heads)); };
    const auto head_of = [&](int row) { return unit.first_head + (row & (unit.heads - 1)); };
    const auto is_row = [&](int row) { return sequence_of(row) < p.batch && head_of(row) < group_heads; };
#pragma unroll 1
    for (int row = warp; row < unit.rows(); row += kSideThreads / 32)
      if (is_row(row))
        normalize<T>(p, sequence_of(row), unit.head, unit.head * group_heads + head_of(row), rows[row], states[row],
                     lane);
    __syncthreads();
    if (p.rotation_v.matrix) {
      if (kTiles == 1 || unit.rows() <= 8)
        dense.template apply<1>(rows);
      else
        dense.template apply<kTiles>(rows);
    } else if (p.rotation_v.order >= 1) {
      rotate_hadamard<kDim>(rows, unit.rows(), p.rotation_v, unit.head, true);
    }
#pragma unroll 1
    for (int i = thread; i < unit.rows() * kDim; i += kSideThreads) {
      const int row = i / kDim, channel = i % kDim;
      if (!is_row(row)) continue;
      Activation* out = static_cast<Activation*>(p.out) + sequence_of(row) * p.out_stride +
                        static_cast<std::int64_t>(unit.head * group_heads + head_of(row)) * kDim;
      const float center = p.center_v ? p.center_v[unit.head * kDim + channel] : 0.0f;
      from_float(fmaf(states[row].y, center, rows[row][channel]), out[channel]);
    }
    __syncthreads();
  }
  ptx::griddepcontrol_wait();  // the end of this grid stands for the end of those before it
}

}  // namespace kvq::decode
