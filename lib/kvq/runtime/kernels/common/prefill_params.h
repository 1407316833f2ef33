#pragma once

#include <kvq/runtime/kernels/common/page_view.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// One call of attention of new queries over a packed prefix and the new tokens themselves: query i of a chunk sees the
/// prefix and the new tokens 0 .. i. Strides are in elements, from token to token; heads are D apart.
struct PrefillParams {
  // model
  int num_q_heads = 0;
  float softmax_scale = 0.0f;
  float logit_softcap = 0.0f;          ///< scores become softcap * tanh(score / softcap); 0 = as they are
  int sliding_window = 0;              ///< tokens that a query sees, itself included; 0 = all
  const float* sink_logits = nullptr;  ///< [Hq] learned attention sinks, or null

  // the chunks of all sequences, one after the other: fp16 or bf16, 16-byte aligned, strides multiples of 8
  int num_tokens = 0;                      ///< T
  const std::int32_t* q_indptr = nullptr;  ///< [B + 1] first token of each sequence's chunk
  const void* q = nullptr;                 ///< [T, Hq, D] unrotated
  const void* k = nullptr;                 ///< [T, Hkv, D] as the model gives them
  const void* v = nullptr;
  void* out = nullptr;   ///< [T, Hq, D]
  float* lse = nullptr;  ///< [T, Hq] natural logarithm of the sum of exponentials, or null
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, out_stride = 0;

  // the prefix. If the chunk is in the cache already, seq_lens counts it, but prefix_lens does not.
  PagedCacheView cache = {};
  const std::int32_t* prefix_lens = nullptr;  ///< [B] tokens before the chunk, or null: seq_lens

  int max_queries = 0, max_keys = 0;  ///< of a sequence, by the plan

  std::byte* workspace = nullptr;  ///< PrefillLaunch::workspace_bytes, 16-byte aligned
};

/// The work tiles that the workspace holds at once: work tile i is KV head i mod Hkv of sequence i div Hkv.
struct PrefillSlab {
  int first_work_tile = 0, work_tiles = 0;
  int tiles = 0;       ///< tiles of tokens of a work tile, at most
  int row_blocks = 0;  ///< thread blocks of a work tile, at most
};

}  // namespace kvq
