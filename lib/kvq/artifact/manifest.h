#pragma once

#include <kvq/container/json.h>
#include <kvq/plan/layer_plan.h>

namespace kvq {

/// One side's plan without its tensors, and back. `tensor` fields are filled by the caller.
Json plan_to_json(const TensorPlan& plan);
/// @param json  fits the schema
TensorPlan plan_from_json(const Json& json);

}  // namespace kvq
