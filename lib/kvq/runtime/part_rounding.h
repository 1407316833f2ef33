#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <span>

/// What kernels lose that take dense rotations in two 16-bit parts: about 2^-19 of each term of a sum, at most 2^-17.
/// Beside the sum itself that is as little as float32's own rounding only if the terms do not cancel. For an orthogonal
/// A they hardly do; for a transform they do by up to its condition (formats/artifact.md, "Transforms"). Errors of
/// terms are taken as independent.
namespace kvq {

/// Standard error of a sum whose terms have squares that sum to 1.
inline constexpr double kPartRounding = 0x1.8p-19;

/// Standard error of x_rot, of the channel where it is largest, by a dense rotation of one KV head; 0 for others.
double row_rounding(const Rotation& rotation, int kv_head, std::span<const float> x);

/// Golden rows of which those are not firm any more that the rotation of a transform, by four standard errors, may
/// round to other bytes.
GoldenRows golden_in_parts(const LayerPlan& plan, GoldenRows rows);

/// How far decode's result of one query head may be from the golden one by this, relative to its largest number: four
/// standard errors; 0 for orthogonal rotations.
double output_rounding(const LayerPlan& plan, const GoldenRows& rows, int query_head);

}  // namespace kvq
