#pragma once

#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/common.cuh>

#include <cstdint>

namespace kvq::decode {

/// q . center of a query, as a base-2 score. It is the same for every key, so it cancels in a softmax of scores that
/// are not capped, but LSE and sink logits need it. All lanes of one warp call it.
template <typename T>
__device__ __forceinline__ float center_score(const DecodeKernelParams& p, std::int64_t q_row, int head, int query_head,
                                              int lane) {
  const typename T::Activation* q =
      static_cast<const typename T::Activation*>(p.q) + q_row * p.q_stride + query_head * T::kHeadDim;
  const float* center = p.cache.center_k + head * T::kHeadDim;
  float score = 0.0f;
#pragma unroll 1
  for (int c = lane; c < T::kHeadDim; c += 32) score = fmaf(to_float(__ldcg(q + c)), center[c], score);
  for (int step = 1; step < 32; step *= 2) score += __shfl_xor_sync(kAll, score, step);
  return score * (p.softmax_scale * kLog2e);
}

}  // namespace kvq::decode
