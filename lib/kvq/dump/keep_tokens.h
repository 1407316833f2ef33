#pragma once

#include <kvq/dump/dump_file.h>

#include <cstdint>

namespace kvq {

/// Keeps tokens [first, first + count) of a layer and drops the others. A sequence that is cut keeps the positions of
/// its remaining tokens. content_hash becomes the hash of "<old hash> <first> <count>". o_proj, o_proj_metric and
/// output_curvature stay.
/// @param first, count  within the dump
void keep_tokens(LayerActivations& layer, std::int64_t first, std::int64_t count);

}  // namespace kvq
