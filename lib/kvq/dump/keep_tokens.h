#pragma once

#include <kvq/dump/dump_file.h>

#include <cstdint>

namespace kvq {

/// Leaves tokens [first, first + count) of a layer; sequences that are cut begin or end there, with their positions as
/// they were. content_hash becomes that of "<old hash> <first> <count>". o_proj, its metric and curvature stay.
/// @param first, count  within the dump
void keep_tokens(LayerActivations& layer, std::int64_t first, std::int64_t count);

}  // namespace kvq
