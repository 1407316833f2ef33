#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>
#include <kvq/runtime/kernels/decode/traits.cuh>

/// What the attending warps of a block do together: rotate queries and results, merge partial results.
namespace kvq::decode {

// ---- 1. Rotations of queries and results, by the whole block -----------------------------------------------------

/// rows  rotation in place; rows [kHeads, D]. `transposed`: a block Hadamard the other way (a dense matrix is stored
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
  } else if (rotation.order >= 1) {
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

// ---- 2. Merging partial results ----------------------------------------------------------------------------------

/// Adds `count` records; by all threads. Leaves values, largest score and sum in the block's own record, which may be
/// one of them.
/// param state_of   (record, head) -> float2
/// param values_of  (record, float4 of values) -> float4
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
    __syncwarp();
    if (lane == 0) shared.record.state[head].y = merged.y * inverse;  // what the tokens have, beside a learned sink
    if (p.lse && lane == 0)
      p.lse[static_cast<std::int64_t>(item.sequence) * p.num_q_heads + query_head] =
          (merged.x + shift + log2f(sum)) * kLn2;
  }
  sync<T>();
  rotate<T>(shared, p.rotation_v, item.head, true);
  Activation* out = static_cast<Activation*>(p.out) + item.sequence * p.out_stride + item.head * group_heads * kDim;
  for (int i = thread; i < group_heads * kDim; i += T::kThreads)
    from_float(fmaf(shared.record.state[i / kDim].y, p.center_v ? p.center_v[item.head * kDim + i % kDim] : 0.0f,
                    shared.record.value[i / kDim][i % kDim]),
               out[i]);
  sync<T>();
}

}  // namespace kvq::decode
