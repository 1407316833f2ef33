#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq {

/// What lies in tensors and not in the manifest, of the layers' mixed widths, codebooks, trellis codes, transforms and
/// centroids.
/// @param manifest  artifact_manifest(artifact)
/// @param layer     only this one, or -1 for all
/// @return          a list of layers with `k` and `v`; null if the artifact has none of these
Json details_json(const Artifact& artifact, const Json& manifest, int layer);

}  // namespace kvq
