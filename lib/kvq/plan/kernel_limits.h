#pragma once

#include <kvq/plan/page_layout.h>

/// Limits of the runtime's kernels, in plain numbers, so that tools without CUDA know which layers are served.
namespace kvq {

/// The largest head_dim of either side that the generic kernels support: they keep rows in arrays of this size.
constexpr int kGenericHeadDim = 256;

/// Whether kernels read and write bit tiles, and indices of centroids, which pages hold since 2.2. Everything that asks
/// whether a layer is served asks tiles_have_kernels(): kernels for these tiles are enabled here.
constexpr bool kBitTileKernels = true;
constexpr bool kIndexKernels = true;
constexpr bool tiles_have_kernels(const TileSide& side) {
  return (kBitTileKernels || !side.is_bits()) && (kIndexKernels || side.index_bytes == 0);
}

/// Query heads of a KV head that prefill attention is tested with.
constexpr int kMostPrefillHeads = 16;

}  // namespace kvq
