#pragma once

#include <kvq/container/json.h>
#include <kvq/core/geometry.h>

namespace kvq {

/// The `geometry` block of a layer, shared by artifact and statistics.
Json geometry_to_json(const LayerGeometry& geometry);
/// From a block that fits the schema; checks what a schema cannot say (heads divide, rotary slice inside the head).
/// @throws Error{bad_input}
LayerGeometry geometry_from_json(const Json& json, std::string_view where);

/// The `model` block, without layers.
Json model_to_json(const ModelGeometry& model);
ModelGeometry model_from_json(const Json& json);

}  // namespace kvq
