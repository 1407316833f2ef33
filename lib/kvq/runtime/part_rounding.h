#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <span>

/// Rounding errors of kernels that apply dense rotations in two 16-bit parts: about 2^-19 of each term of a sum, at
/// most 2^-17. Relative to the sum this is as small as float32's own rounding only if the terms do not cancel. For an
/// orthogonal A they hardly cancel; for a transform they may, by up to its condition (formats/artifact.md,
/// "Transforms"). The errors of the terms are assumed to be independent.
namespace kvq {

/// Standard error of a sum whose terms have squares that sum to 1.
inline constexpr double kPartRounding = 0x1.8p-19;

/// Largest standard error of a channel of x_rot, for a dense rotation of one KV head; 0 for other rotations.
double row_rounding(const Rotation& rotation, int kv_head, std::span<const float> x);

/// The golden rows, with fewer firm ones: a row is not firm any more if four standard errors of the rotation may change
/// its bytes.
GoldenRows golden_in_parts(const LayerPlan& plan, GoldenRows rows);

/// Bound on the error that these rounding errors cause in decode's result of one query head, relative to the largest
/// number of the golden result: four standard errors; 0 for orthogonal rotations.
double output_rounding(const LayerPlan& plan, const GoldenRows& rows, int query_head);

}  // namespace kvq
