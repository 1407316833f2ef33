#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// Bytes of a cache of this artifact: of each row, token and page, and the alignment of pages.
std::string describe_layout(const Artifact& artifact, int page_size, std::int64_t context);
Json layout_json(const Artifact& artifact, int page_size, std::int64_t context);

/// Offsets of the parts of one head's row (formats/packing.md, "Bytes"): codes of each width, scales, index, padding.
std::string describe_segments(const LayerPlan& layer, int head);
Json segments_json(const LayerPlan& layer, int head);

}  // namespace kvq
