#pragma once

#include <kvq/eval/stored_side.h>

#include <memory>

namespace kvq {

/// Where the scale of fp8 rows comes from.
enum class Fp8Scale {
  tensor,  ///< one for all heads and tokens of a side of a layer
  head,    ///< one for each KV head
  one,     ///< 1: what serving engines use if a checkpoint brings no scales
};

/// Rows in e4m3 (formats/eval.md, `fp8`): x^ = scale e4m3(x / scale) with scale = max |x| / 448 over the dump, as a
/// calibration on the dump itself would find it, or 1. An object stores rows of one tensor: it keeps the scales of the
/// first one that it sees.
std::unique_ptr<StoredSide> fp8_side(Fp8Scale scale);

/// Rows in e2m1 with an e4m3 scale for each 16 channels and a binary32 scale for the side of a layer (formats/eval.md,
/// `nvfp4`). An object stores rows of one tensor, as fp8_side() does.
std::unique_ptr<StoredSide> nvfp4_side(int dim);

}  // namespace kvq
