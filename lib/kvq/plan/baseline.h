#pragma once

#include <kvq/plan/scheme.h>

namespace kvq {

/// The one baseline that every method is compared with: plain min-max codes of about as many bytes. Rows as the model
/// has them, without map, center, clip and centroids; affine codes, fp16 scales and minima.
///
/// Of all widths of 1 to 8 bits and all group sizes of 16 channels or more that divide `dim` (or `dim` itself), the one
/// with the fewest bytes a row that has at least `row_bytes`, and of equal sizes the widest code. So the baseline never
/// has fewer bytes than the plan, and what a plan gains over the baseline is not owed to its size. If all are smaller,
/// the largest.
/// @param row_bytes  of the plan's rows
/// @param dim        channels of a row
UniformCoder plain_baseline(int row_bytes, int dim);

}  // namespace kvq
