#pragma once

#include <kvq/core/for_each.h>
#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <cstdint>
#include <span>
#include <string>

namespace kvq {

/// Quantizes golden tokens by `plan` and computes attention over the dequantized rows (formats/artifact.md, "Golden
/// rows").
/// @param plan      valid
/// @param tokens    with the extents of plan.geometry, finite
/// @param for_each  runs the tokens of each side
/// @throws          Error{numerical} if rows or output overflow float32
GoldenRows code_golden_rows(const LayerPlan& plan, GoldenTokens tokens, const ForEach& for_each = one_after_another);

/// The first difference between `rows` and code_golden_rows() of their tokens, for people; empty if there is none.
/// Bytes must be equal; an output may differ by 1e-6 of its head's largest output.
std::string golden_fault(const LayerPlan& plan, const GoldenRows& rows);

/// Whether a row keeps its bytes when all channels of x_rot move by `step`, up or down (formats/artifact.md, "Firm
/// rows", with a step of 2^-18 times the row's largest magnitude).
/// @param plan  not exact, without centroids
bool survives_probes(const TensorPlan& plan, int kv_head, std::span<const float> x_rot, float step,
                     std::span<const std::uint8_t> bytes);

}  // namespace kvq
