#pragma once

#include <kvq/runtime/kernels/common/page_view.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// One call of decode attention: one new query token a sequence. Strides are in elements.
struct DecodeParams {
  // model
  int num_q_heads = 0;
  float softmax_scale = 0.0f;
  int sliding_window = 0;              ///< tokens that a query sees, itself included; 0 = all
  const float* sink_logits = nullptr;  ///< [Hq] learned attention sinks, or null

  // queries and result, fp16 or bf16
  const void* q = nullptr;    ///< [B, Hq, D] unrotated
  std::int64_t q_stride = 0;  ///< from sequence to sequence; heads are D apart
  void* out = nullptr;        ///< [B, Hq, D]
  std::int64_t out_stride = 0;
  float* lse = nullptr;  ///< [B, Hq] natural logarithm of the sum of exponentials, or null

  /// With the newest token. Decode rotates queries instead of keys, and the result instead of values; center_k enters
  /// lse and sink logits only.
  PagedCacheView cache = {};

  /// decode_workspace_bytes() (variant.h), aligned to 256; may hold anything
  void* workspace = nullptr;
};

/// What run_decode() adds for the kernels.
struct DecodeKernelParams : DecodeParams {
  // regions of the workspace (workspace.h)
  std::int32_t* work_counter = nullptr;       ///< atomic: next split to claim
  unsigned long long* completions = nullptr;  ///< [B, Hkv] completion counter of each work tile (schedule.h)
  void* operands = nullptr;                   ///< [B, Hkv] queries as tensor-core operands (DecodeTraits::Operand)
  void* partials = nullptr;                   ///< partial results (schedule.h)

  int one_round_splits = 0;  ///< DecodeGrids::one_round_splits
};

}  // namespace kvq
