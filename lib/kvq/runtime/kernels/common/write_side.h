#pragma once

#include <kvq/plan/scheme.h>
#include <kvq/runtime/kernels/common/row_code.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

/// The rows of one side, and how they are rotated and quantized.
struct WriteSide {
  const void* x = nullptr;             ///< [T, Hkv, D] fp16 or bf16; a head's channels are contiguous, heads D apart
  std::int64_t token_stride = 0;       ///< elements from token to token
  const float* center = nullptr;       ///< [Hkv, D] rotated center, subtracted from rotated rows; or null
  const std::int8_t* signs = nullptr;  ///< [Hkv, D] or [D] of +1, -1 before the Hadamard blocks, or null
  bool per_head = false;               ///< signs or factors are [Hkv, D], else [D]
  int order = 1;  ///< Hadamard blocks of this many channels: a power of two that divides D; 1 = none
  ScaleRule rule = ScaleRule::minmax;        ///< affine: minmax; symmetric: absmax, least_squares or norm
  const std::int32_t* clip_ranks = nullptr;  ///< [Hkv] clip_rank() of each head, rule minmax only; or null
  const std::byte* rotation = nullptr;       ///< pack_rotation(), aligned to 16 bytes: dense, order 1; or null
  std::int64_t rotation_stride = 0;          ///< bytes from head to head; 0: one matrix for all
  /// Factors of channels before the Hadamard blocks, instead of signs: sign * channel_scale / row scale, [Hkv, D] or
  /// [D], in the rows' 16-bit type (see write_factors()); or null.
  const std::uint16_t* factors = nullptr;
  /// [Hkv] powers of two that `factors`, or the elements of `rotation` for fp16 rows, were divided by; rotated rows are
  /// multiplied by them; or null: 1.
  const float* row_scales = nullptr;
  RowCode code = {};         ///< for generic kernels and those of codebook codes; of rows with centroids for all
  bool has_indices = false;  ///< the pages have the indices of these tokens' centroids already: choose_centroids()
};

}  // namespace kvq
