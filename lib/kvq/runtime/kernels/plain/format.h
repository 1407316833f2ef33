#pragma once

#include <kvq/plan/page_layout.h>

namespace kvq {

/// What a layer's pages hold. Tuned kernels are compiled for one; the plain kernels of this folder take any.
struct CacheFormat {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< the numbers beside the codes are bfloat16, else fp16
  KVQ_HD constexpr const TileSide& side(bool value) const { return value ? v : k; }
  KVQ_HD constexpr bool bfloat(bool value) const { return value ? v_bfloat : k_bfloat; }
};

/// The largest head_dim of either side that plain kernels take: they keep rows in arrays of this size.
constexpr int kPlainHeadDim = 256;

}  // namespace kvq
