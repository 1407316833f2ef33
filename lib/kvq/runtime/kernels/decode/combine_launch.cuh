#pragma once

#include <kvq/runtime/kernels/decode/combine.cuh>
#include <kvq/runtime/kernels/decode/prepare.cuh>

namespace kvq {

template <int kHeadDim, int kRows, typename Activation>
cudaError_t DecodeCombine<kHeadDim, kRows, Activation>::prepare(bool& overlapping) {
  using Shared = decode::CombineShared<DecodeCombine>;
  static_assert(kWarps == decode::kRotateWarps);
  static_assert(sizeof(Shared) <= kMostDecodeShared);
  return prepare_decode_kernel(decode::combine_kernel<DecodeCombine>, sizeof(Shared), overlapping);
}

template <int kHeadDim, int kRows, typename Activation>
cudaError_t DecodeCombine<kHeadDim, kRows, Activation>::launch(const DecodeKernelParams& params, int blocks,
                                                               int decode_blocks, const decode::CombineSchedule& units,
                                                               bool overlapping, CUstream_st* stream) {
  return launch_kernel(decode::combine_kernel<DecodeCombine>, blocks, decode::kRotateThreads,
                       rotate_shared_bytes<decode::CombineShared<DecodeCombine>>(params.cache.rotation_v), overlapping,
                       stream, params, decode_blocks, units);
}

}  // namespace kvq
