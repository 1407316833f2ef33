#pragma once

#include <kvq/plan/page_layout.h>

namespace kvq {

/// The format of a layer's pages. Tuned kernels are compiled for one format; the generic (`plain`) kernels of this
/// folder read it at run time.
struct CacheFormat {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< scales and minima are bfloat16, else fp16
  KVQ_HD constexpr const TileSide& side(bool value) const { return value ? v : k; }
  KVQ_HD constexpr bool bfloat(bool value) const { return value ? v_bfloat : k_bfloat; }
};

/// The largest head_dim of either side that the generic kernels support: they keep rows in arrays of this size.
constexpr int kPlainHeadDim = 256;

}  // namespace kvq
