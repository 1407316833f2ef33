#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// What one head's channels are worth and the widths that they got, side by side: keys by RoPE block, else by channel.
std::string describe_head(const Artifact& artifact, const LayerPlan& layer, int head, bool color);
Json head_json(const LayerPlan& layer, int head);

}  // namespace kvq
