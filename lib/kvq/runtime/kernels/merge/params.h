#pragma once

#include <kvq/core/status.h>

#include <cstdint>

struct CUstream_st;

namespace kvq {

/// One call that merges S results of attention of the same queries over different keys into the result over all keys.
/// A row is a token's query head. Strides are in elements.
struct MergeParams {
  int num_states = 0;  ///< S
  int num_tokens = 0;  ///< T
  int num_heads = 0;   ///< H
  int head_dim = 0;    ///< D, a multiple of 8
  bool bf16 = true;    ///< results are bfloat16, else fp16

  const void* states = nullptr;      ///< [S, T, H, D] results, 16-byte aligned; heads are D apart
  std::int64_t state_stride = 0;     ///< from result to result, a multiple of 8
  std::int64_t token_stride = 0;     ///< of `states`, a multiple of 8
  const float* state_lse = nullptr;  ///< [S, T, H] natural logarithm of the sums of exponentials; -inf: no key

  void* out = nullptr;  ///< [T, H, D], 16-byte aligned; may be one of `states`
  std::int64_t out_stride = 0;
  float* lse = nullptr;  ///< [T, H] of all keys, or null; apart from state_lse
};

/// Checks the preconditions of a launch. Host only; reads no device memory.
Status check_merge(const MergeParams& params);
/// Loads the kernels onto the current device.
Status load_merge();
/// Enqueues the kernel; may be captured in a CUDA graph.
Status run_merge(const MergeParams& params, CUstream_st* stream);

}  // namespace kvq
