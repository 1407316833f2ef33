#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq {

/// Details that tensors hold and the manifest does not: the numbers of mixed widths, codebooks, trellis codes,
/// transforms and centroids of each layer.
/// @param manifest  artifact_manifest(artifact)
/// @param layer     only this one, or -1 for all
/// @return          a list of layers with `k` and `v`; null if the artifact has no such tensors
Json details_json(const Artifact& artifact, const Json& manifest, int layer);

}  // namespace kvq
