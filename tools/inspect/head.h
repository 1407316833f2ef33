#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// Scores and widths of one head side by side: of keys by RoPE block, else by channel.
std::string describe_head(const Artifact& artifact, const LayerPlan& layer, int head, bool color);
Json head_json(const LayerPlan& layer, int head);

}  // namespace kvq
