#pragma once

#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

#include <cstdint>
#include <span>
#include <string>

namespace kvq {

/// Codes golden tokens as the plan says, and attends over what comes back (formats/artifact.md, "Golden rows").
/// @param plan    valid
/// @param tokens  with the extents of plan.geometry, finite
/// @throws        Error{numerical} if rows or output overflow float32
GoldenRows code_golden_rows(const LayerPlan& plan, GoldenTokens tokens);

/// The first place where `rows` are not what the codec makes of their tokens, for people; empty if there is none. Bytes
/// must be equal, outputs to 1e-6 of the largest of their head.
std::string golden_fault(const LayerPlan& plan, const GoldenRows& rows);

/// Whether a row keeps its bytes when rounding moves its channels by `step` (formats/artifact.md, "Firm rows", whose
/// step is 2^-18 of the row's largest). @param plan  of coded rows, without centroids
bool survives_probes(const TensorPlan& plan, int kv_head, std::span<const float> x_rot, float step,
                     std::span<const std::uint8_t> bytes);

}  // namespace kvq
