#pragma once

#include <kvq/runtime/kernels/decode/rotate.cuh>
#include <kvq/runtime/kernels/decode/schedule.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// Results, after decode: the partial results of an item added up, divided by their sum and rotated back. A kernel of
/// its own, whose blocks take the places of those of decode as they end, read the rotation, and take up each item when
/// its last part arrives, not when the last block of decode has ended. They come up only after all blocks of decode
/// have, so whom they wait for is at work.
namespace kvq::decode {

/// Adds up `count` partial results of the query heads [head, head + n); leaves values in `rows`, the reference of the
/// exponentials and the sum in `states`.
/// @param record_of  number of the partial result -> pointer
template <typename T, typename RecordOf>
__device__ __forceinline__ void add_up(PaddedRow<T::kHeadDim>* rows, float2* states, float4* part_values,
                                       float2* part_states, int head, int n, int count, RecordOf record_of) {
  constexpr int kQuads = T::kHeadDim / 4, kAtOnce = kSideThreads / kQuads, kBatch = 6;
  const int thread = static_cast<int>(threadIdx.x);
  for (int base = 0; base < n; base += kAtOnce) {
    const int heads = min(n - base, kAtOnce), splits = kSideThreads / (heads * kQuads);
    const int h = thread / kQuads % heads, quad = thread % kQuads, split = thread / (heads * kQuads);
    float max = kMinusInf, sum = 0.0f;
    float4 values = make_float4(0, 0, 0, 0);
    if (split < splits)
      for (int first = split; first < count; first += splits * kBatch) {
        float2 state[kBatch];
        float4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int r = first + i * splits;
          state[i] = make_float2(kMinusInf, 0.0f), v[i] = make_float4(0, 0, 0, 0);
          if (r < count) {
            const typename T::Record& record = *record_of(r);
            state[i] = __ldcg(&record.state[head + base + h]);
            v[i] = __ldcg(reinterpret_cast<const float4*>(record.value[head + base + h]) + quad);
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
    part_values[thread] = values, part_states[thread] = make_float2(max, sum);
    __syncthreads();
    if (split == 0) {
      for (int s = 1; s < splits; ++s) {
        const int other = s * heads * kQuads + thread;
        const float2 state = part_states[other];
        const float larger = fmaxf(max, state.x);
        if (state.x == kMinusInf) continue;
        const float keep = ptx::ex2(max - larger), factor = ptx::ex2(state.x - larger);
        const float4 v = part_values[other];
        values.x = fmaf(factor, v.x, values.x * keep), values.y = fmaf(factor, v.y, values.y * keep);
        values.z = fmaf(factor, v.z, values.z * keep), values.w = fmaf(factor, v.w, values.w * keep);
        sum = fmaf(factor, state.y, sum * keep);
        max = larger;
      }
      reinterpret_cast<float4*>(rows[base + h])[quad] = values;
      if (quad == 0) states[base + h] = make_float2(max, sum);
    }
    __syncthreads();
  }
}

/// Grid: as many blocks as one likes; each takes `heads_each` query heads of an item at a time.
template <typename T>
__global__ void __launch_bounds__(kSideThreads, 2)
    combine_kernel(const __grid_constant__ DecodeParams p, int decode_blocks, int heads_each) {
  using Activation = typename T::Activation;
  constexpr int kDim = T::kHeadDim;
  constexpr int kTiles = (T::kHeads + 7) / 8;
  __shared__ __align__(16) PaddedRow<kDim> rows[8 * kTiles];
  __shared__ __align__(16) float4 part_values[kSideThreads];
  __shared__ float2 part_states[kSideThreads], states[T::kHeads];
  __shared__ Arrivals arrivals;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int group_heads = p.num_q_heads / p.num_kv_heads;
  const int splits = (group_heads + heads_each - 1) / heads_each, units = p.batch * p.num_kv_heads * splits;

  ptx::griddepcontrol_launch_dependents();
  DenseRotation<kDim> dense;
  for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
    const int head = unit % p.num_kv_heads, sequence = unit / p.num_kv_heads / splits;
    const int first_head = unit / p.num_kv_heads % splits * heads_each, n = min(heads_each, group_heads - first_head);
    const int first_row = head * group_heads + first_head;
    if (p.rotation_v.matrix) dense.open(p.rotation_v, head);
    Activation* out =
        static_cast<Activation*>(p.out) + sequence * p.out_stride + static_cast<std::int64_t>(first_row) * kDim;
    const Span span = span_of<T>(p, sequence);
    if (span.slots == 0) {  // no visible token
      for (int i = thread; i < n * kDim; i += kSideThreads) from_float(0.0f, out[i]);
      if (p.lse && thread < n)
        p.lse[static_cast<std::int64_t>(sequence) * p.num_q_heads + first_row + thread] =
            p.sink_logits ? p.sink_logits[first_row + thread] : kMinusInf;
      continue;
    }
    const int item = sequence * p.num_kv_heads + head;
    if (thread == 0) {
      Arrivals now;
      while (now.bits = ptx::ld_acquire(p.arrivals + item), !now.complete(T::kTeams == 1 ? T::kWarps : 1))
        __nanosleep(40);
      arrivals = now;
    }
    __syncthreads();
    const int count = arrivals.parts(), first_piece = arrivals.first_piece();
    const auto record = [&](int r) {
      return static_cast<const typename T::Record*>(p.partials) +
             record_of(decode_blocks, Part{item, first_piece + r, r == 0, r == count - 1});
    };
    add_up<T>(rows, states, part_values, part_states, first_head, n, count, record);

    for (int h = warp; h < n; h += kSideThreads / 32) {
      const int query_head = first_row + h;
      float shift = 0.0f;  // q . center, the same for every key: the softmax does not see it, LSE and sink logits do
      if (p.center_k && (p.lse || p.sink_logits)) {
        const Activation* q = static_cast<const Activation*>(p.q) + sequence * p.q_stride + query_head * kDim;
        for (int c = lane; c < kDim; c += 32) shift = fmaf(to_float(__ldcg(q + c)), p.center_k[head * kDim + c], shift);
        for (int step = 1; step < 32; step *= 2) shift += __shfl_xor_sync(kAll, shift, step);
        shift *= p.softmax_scale * kLog2e;
      }
      const float2 state = states[h];
      const float sink = p.sink_logits ? p.sink_logits[query_head] * kLog2e - shift : kMinusInf;
      const float reference = fmaxf(state.x, sink);  // a learned sink may be far above all scores
      const float tokens = state.y * exp2f(state.x - reference), sum = tokens + exp2f(sink - reference);
      const float inverse = exp2f(state.x - reference) / sum;
      for (int c = lane; c < kDim; c += 32) rows[h][c] *= inverse;
      __syncwarp();
      if (lane == 0) {
        states[h].y = tokens / sum;  // what the tokens have, beside a learned sink
        if (p.lse)
          p.lse[static_cast<std::int64_t>(sequence) * p.num_q_heads + query_head] =
              (reference + shift + log2f(sum)) * kLn2;
      }
    }
    __syncthreads();
    if (p.rotation_v.matrix)
      dense.template apply<kTiles>(rows);
    else if (p.rotation_v.order >= 1)
      rotate_hadamard<kDim>(rows, n, p.rotation_v, head, true);
    for (int i = thread; i < n * kDim; i += kSideThreads)
      from_float(
          fmaf(states[i / kDim].y, p.center_v ? p.center_v[head * kDim + i % kDim] : 0.0f, rows[i / kDim][i % kDim]),
          out[i]);
    __syncthreads();
  }
  ptx::griddepcontrol_wait();  // the end of this grid stands for the end of those before it
}

}  // namespace kvq::decode
