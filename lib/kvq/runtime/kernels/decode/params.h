#pragma once

#include <kvq/runtime/kernels/common/page_view.h>
#include <kvq/runtime/kernels/decode/schedule.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// One call of decode attention: for the newest tokens of each sequence, which are in the cache. Strides are in
/// elements. T tokens in all; without q_indptr one of each sequence, T = B.
struct DecodeParams {
  // model
  int num_q_heads = 0;
  float softmax_scale = 0.0f;
  float logit_softcap = 0.0f;          ///< scores become softcap * tanh(score / softcap); 0 = as they are
  int sliding_window = 0;              ///< tokens that a query sees, itself included; 0 = all
  const float* sink_logits = nullptr;  ///< [Hq] learned attention sinks, or null

  // queries and result, fp16 or bf16
  const void* q = nullptr;    ///< [T, Hq, D] unrotated
  std::int64_t q_stride = 0;  ///< from token to token; heads are D apart
  void* out = nullptr;        ///< [T, Hq, D]
  std::int64_t out_stride = 0;
  float* lse = nullptr;  ///< [T, Hq] natural logarithm of the sum of exponentials, or null

  // several new tokens of a sequence
  const std::int32_t* q_indptr = nullptr;  ///< [B + 1] rows of each sequence's new tokens, or null
  int num_tokens = 0;                      ///< T, if there is q_indptr
  int max_new_tokens = 1;                  ///< of a sequence
  /// [T] bit i: the query sees new token i of its sequence; or null: each query sees the tokens up to its own
  const std::uint32_t* token_masks = nullptr;

  // the positions that queries may see: [first, last) of each sequence
  const std::int32_t* first = nullptr;  ///< [B] or null: from 0
  const std::int32_t* last = nullptr;   ///< [B] or null: to the end

  /// With the new tokens. Decode rotates queries instead of keys, and the result instead of values; center_k enters
  /// lse and sink logits only.
  PagedCacheView cache = {};

  /// decode_workspace_bytes() (variant.h), aligned to 256; may hold anything
  void* workspace = nullptr;

  /// The queries kernel does not wait for the stream's kernel before, but runs beside it. That kernel must be a write
  /// with WriteParams::holds_next; it writes neither queries, nor tables of sequences, nor the workspace.
  bool inputs_final = false;

  /// T
  KVQ_HD int tokens() const { return q_indptr ? num_tokens : cache.batch; }
};

/// Whether kvq_append_run prepares queries beside its write (inputs_final). For several sequences that is slower
/// (docs/measurements.md, "Few sequences").
constexpr bool prepares_beside_write(int batch) { return batch == 1; }

/// What run_decode() adds for the kernels.
struct DecodeKernelParams : DecodeParams {
  DecodePasses passes = {};

  // regions of the workspace (workspace.h)
  std::int32_t* work_counter = nullptr;       ///< atomic: next split to claim
  unsigned long long* completions = nullptr;  ///< [passes, Hkv] completion counter of each work tile (schedule.h)
  void* operands = nullptr;                   ///< [passes, Hkv] queries as tensor-core operands (DecodeTraits::Operand)
  void* partials = nullptr;                   ///< partial results (schedule.h)

  int one_round_splits = 0;  ///< DecodeGrids::one_round_splits

  int heads_per_kv_head = 0;  ///< given, because a division takes long
  /// Of all sequences.
  KVQ_HD int num_passes() const { return cache.batch * passes.count; }
};

}  // namespace kvq
