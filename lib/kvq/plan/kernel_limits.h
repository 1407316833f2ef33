#pragma once

#include <kvq/plan/page_layout.h>

/// Limits of the runtime's kernels, in plain numbers, so that tools without CUDA know which layers are served.
namespace kvq {

/// The largest head_dim of either side that the generic kernels support: they keep rows in arrays of this size.
constexpr int kGenericHeadDim = 256;
/// Whether they support a head_dim: they load eight channels of 16 bits at once.
constexpr bool is_generic_head_dim(int head_dim) { return head_dim <= kGenericHeadDim && head_dim % 8 == 0; }

/// The rows in bit tiles that tuned kernels dequantize, if these kernels know their codes (tuned_rows() of serving.h).
constexpr int kLinearHeadDim = 128, kMostLinearRowWords = 16, kMostRowNumbers = 8;
constexpr bool dequantizes_coded(const TileSide& side) {
  return side.is_bits() && side.head_dim == kLinearHeadDim && side.numbers >= 1 && side.numbers <= kMostRowNumbers &&
         !side.integer_zero && side.index_bytes == 0 && side.row_words <= kMostLinearRowWords;
}
constexpr bool dequantizes_linear(const TileSide& side) {
  return dequantizes_coded(side) && side.numbers == 1 && side.table_bits == 0 && !side.segments;
}

/// Centroids of a KV head whose rows tuned kernels decode: an index of one byte has so many.
constexpr int kMostTunedCentroids = 256;

/// Query heads of a KV head that prefill attention is tested with.
constexpr int kMostPrefillHeads = 16;

}  // namespace kvq
