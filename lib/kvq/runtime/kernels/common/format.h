#pragma once

#include <kvq/plan/kernel_limits.h>
#include <kvq/plan/page_layout.h>

namespace kvq {

/// The format of a layer's pages. Tuned kernels are compiled for one format; generic kernels, for all
/// formats of formats/pages.md without an entry in variants.json, read it at run time: simple, but slower.
struct CacheFormat {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< numbers of two bytes are bfloat16, else fp16
  KVQ_HD constexpr const TileSide& side(bool value) const { return value ? v : k; }
  KVQ_HD constexpr bool bfloat(bool value) const { return value ? v_bfloat : k_bfloat; }
};

/// Do the generic kernels support this format? The sides must be results of page_layout_of().
constexpr bool generic_supports(const CacheFormat& format) {
  return is_generic_head_dim(format.k.head_dim) && is_generic_head_dim(format.v.head_dim);
}

}  // namespace kvq
