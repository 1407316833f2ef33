#pragma once

#include <kvq/plan/layer_plan.h>

#include <string>

namespace kvq {

/// Largest deviation of a rotation from its recipe that rounding to float32 explains, element by element.
inline constexpr double kRecipeTolerance = 1e-6;

/// Compares a rotation's recipe with its kind, tensors and transform. A dense rotation whose factors are all in the
/// file (U, H, P, signs) must be their product; of a gathered one (G), channels must come from where `channel_order`
/// says. Recipes with words that this version does not know are not compared.
/// @param plan  valid
/// @return      the first fault; empty if there is none
std::string recipe_fault(const TensorPlan& plan, int dim);

}  // namespace kvq
