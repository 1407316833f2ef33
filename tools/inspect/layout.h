#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// Bytes that a cache of this artifact takes: per token, per page, alignment.
std::string describe_layout(const Artifact& artifact, int page_size, std::int64_t context);
Json layout_json(const Artifact& artifact, int page_size, std::int64_t context);

/// Where the parts of one head's row lie (formats/packing.md, "Bytes"): codes of each width, numbers, index, padding.
std::string describe_segments(const LayerPlan& layer, int head);
Json segments_json(const LayerPlan& layer, int head);

}  // namespace kvq
