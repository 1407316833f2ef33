#pragma once

/// Limits of the runtime's kernels, in plain numbers, so that tools without CUDA know which layers are served.
namespace kvq {

/// The largest head_dim of either side that the generic kernels support: they keep rows in arrays of this size.
constexpr int kGenericHeadDim = 256;
/// Whether they support a head_dim: they load eight channels of 16 bits at once.
constexpr bool is_generic_head_dim(int head_dim) { return head_dim <= kGenericHeadDim && head_dim % 8 == 0; }

/// Query heads of a KV head that prefill attention is tested with.
constexpr int kMostPrefillHeads = 16;

}  // namespace kvq
