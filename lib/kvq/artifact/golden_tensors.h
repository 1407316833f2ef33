#pragma once

#include <kvq/container/json.h>
#include <kvq/container/safetensors.h>
#include <kvq/plan/golden_rows.h>
#include <kvq/plan/layer_plan.h>

namespace kvq {

/// Adds the tensors of one layer's golden rows, `layers.<i>.golden.*`.
void add_golden_rows(SafetensorsWriter& writer, const LayerPlan& plan, const GoldenRows& rows);

/// @param json  the layer's `golden` in the manifest; fits the schema
/// @param plan  valid
/// @throws      Error{bad_input} for missing tensors, other types and shapes, numbers that are not finite
GoldenRows read_golden_rows(const SafetensorsFile& file, const LayerPlan& plan, const Json& json);
Json golden_json(const GoldenRows& rows);

/// Adds bfloat16 numbers as U16 bits, for statistics and artifacts, so that programs without a bfloat16 type can load
/// all tensors.
void add_bf16(SafetensorsWriter& writer, std::string name, std::vector<std::int64_t> shape,
              const std::vector<std::uint16_t>& bits);
/// @throws Error{bad_input} for another type or shape, NaN or Inf
std::vector<std::uint16_t> read_bf16(const SafetensorsFile& file, const std::string& name,
                                     const std::vector<std::int64_t>& shape);

}  // namespace kvq
