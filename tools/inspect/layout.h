#pragma once

#include <kvq/artifact/artifact.h>

#include <cstdint>
#include <string>

namespace kvq {

/// Bytes of a token, all layers and KV heads, outside the exact windows; and of the same token in bfloat16.
double token_bytes(const Artifact& artifact);
double bf16_token_bytes(const Artifact& artifact);
/// Bytes of a sequence of `context` tokens, exact windows included.
double cache_bytes(const Artifact& artifact, std::int64_t context);

/// Bytes of a cache of this artifact: of each row and token, and where pages hold a layer (plan/layer_pages.h) of each
/// page and the alignment of pages; otherwise the reason why not.
std::string describe_layout(const Artifact& artifact, int page_size, std::int64_t context);
Json layout_json(const Artifact& artifact, int page_size, std::int64_t context);

/// Offsets of the parts of one head's row (formats/packing.md, "Bytes"): codes of each width, scales, index, padding.
std::string describe_segments(const LayerPlan& layer, int head);
Json segments_json(const LayerPlan& layer, int head);

}  // namespace kvq
