#pragma once

#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// Rotation of one side as kernels that read a cache apply it; per KV head, or one for all if `per_head` is false. With
/// A as in plan/rotation.h: queries are multiplied by the keys' A^-T, which is A itself if A is orthogonal; outputs are
/// multiplied by the values' A^-1. The memory must not change while work is enqueued, because kernels read it before
/// the kernels ahead of them have ended.
struct DeviceRotation {
  int order = 0;  ///< Hadamard blocks of this many channels; 0 = none
  bool per_head = false;
  const std::int8_t* signs = nullptr;    ///< [H, D] +1, -1, with `order`; may be null
  const float* matrix = nullptr;         ///< [H, D, D] row-major: A^-T of keys, A^-1 of values; null if not dense. Wins
                                         ///< over `order`
  const std::byte* fragments = nullptr;  ///< the matrix for decode (rotation_layout.h), aligned to 16; with `matrix`
  const float* factors = nullptr;        ///< [H, D] sign / channel_scale, instead of `signs`; with `order`, or null
  const float* sizes = nullptr;  ///< [H, D] power of two above the largest magnitude of each column of A^-1. Null
                                 ///< with `matrix`: A is orthogonal, and all are 1
};

/// One call of decode attention: one new query token a sequence. Strides are in elements.
struct DecodeParams {
  // model
  int batch = 0, num_q_heads = 0, num_kv_heads = 0;
  float softmax_scale = 0.0f;

  // queries and result, fp16 or bf16
  const void* q = nullptr;    ///< [B, Hq, D] unrotated
  std::int64_t q_stride = 0;  ///< from sequence to sequence; heads are D apart
  void* out = nullptr;        ///< [B, Hq, D]
  std::int64_t out_stride = 0;
  float* lse = nullptr;  ///< [B, Hq] natural logarithm of the sum of exponentials, or null

  // which tokens; position and length alone decide whether a token is exact or coded
  const std::int32_t* seq_lens = nullptr;  ///< [B] tokens of each sequence, the newest included
  int sink_tokens = 0, recent_tokens = 0;  ///< exact (bfloat16) tokens at the two ends of a sequence
  int sliding_window = 0;                  ///< tokens that a query sees, itself included; 0 = all

  // coded pages
  const std::byte* pages = nullptr;           ///< 16-byte aligned
  const std::int32_t* page_table = nullptr;   ///< [B, max_pages], or one list if page_indptr is given
  const std::int32_t* page_indptr = nullptr;  ///< [B + 1] or null
  std::int64_t page_table_stride = 0;
  int page_shift = 6;            ///< log2 of page_size
  std::int64_t page_stride = 0;  ///< bytes from page to page, at least PageLayout::page_bytes()

  // exact windows
  const std::byte* windows = nullptr;          ///< 16-byte aligned, or null without windows
  const std::int32_t* window_slots = nullptr;  ///< [B] window slot of each sequence
  WindowLayout window_layout = {};

  // rotations: of queries and keys, and of values (undone on the result; identity if folded into the weights)
  DeviceRotation rotation_k = {};
  DeviceRotation rotation_v = {};      ///< x = x_rot @ matrix
  const float* center_k = nullptr;     ///< [Hkv, D] or null; enters lse and sink logits only
  const float* center_v = nullptr;     ///< [Hkv, D] or null
  const float* sink_logits = nullptr;  ///< [Hq] learned attention sinks, or null

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
