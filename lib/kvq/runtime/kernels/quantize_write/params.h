#pragma once

#include <kvq/plan/page_layout.h>
#include <kvq/plan/scheme.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// How one side's rows are coded.
struct WriteSide {
  const void* x = nullptr;             ///< [T, Hkv, D] fp16 or bf16; a head's channels are contiguous, heads D apart
  std::int64_t token_stride = 0;       ///< elements from token to token
  const float* center = nullptr;       ///< [Hkv, D] subtracted first, or null
  const std::int8_t* signs = nullptr;  ///< [Hkv, D] or [D] of +1, -1 before the Hadamard blocks, or null
  bool per_head = false;               ///< of the signs
  int order = 1;  ///< Hadamard blocks of this many channels: a power of two that divides D; 1 = none
  ScaleRule rule = ScaleRule::minmax;  ///< affine: minmax; symmetric: absmax, least_squares or norm
};

/// One call that rotates, quantises and writes tokens into pages.
struct WriteParams {
  int num_tokens = 0, num_kv_heads = 0;
  WriteSide k, v;
  const std::int64_t* slot_mapping = nullptr;  ///< [T] page * page_size + slot of each token; negative: not written
  std::byte* pages = nullptr;                  ///< 16-byte aligned
  int page_shift = 6;                          ///< log2 of page_size: 4, 5 or 6
  std::int64_t page_stride = 0;                ///< bytes from page to page
};

}  // namespace kvq
