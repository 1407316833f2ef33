#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq::test {

/// A small artifact with everything that the format has: dense, block Hadamard and identity rotations, all coders,
/// centres, clips, a shared rotation, an exact layer, a layer without values. Layers 0, 1 and 4 of 6.
Artifact example_artifact();

}  // namespace kvq::test
