#pragma once

#include <kvq/artifact/artifact.h>

#include <string>

namespace kvq {

/// The whole artifact on a page of 80 columns.
std::string describe(const Artifact& artifact, bool color);
/// One layer in detail: geometry, every head's clip ratio, spectrum, signs.
std::string describe_layer(const Artifact& artifact, const LayerPlan& layer);

/// Bytes that a cache of this artifact takes: per token, per page, alignment.
std::string describe_layout(const Artifact& artifact, int page_size, std::int64_t context);
Json layout_json(const Artifact& artifact, int page_size, std::int64_t context);

/// Eight block characters for a descending spectrum, on a logarithmic scale.
std::string sparkline(const float* values, int count, int columns);

}  // namespace kvq
