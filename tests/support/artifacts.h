#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq::test {

/// A small artifact with every feature of format 1.0: dense, block Hadamard and identity rotations, all coders,
/// centers, clips, a shared rotation, an exact layer, a layer without values. Has layers 0, 1 and 4 of 6.
Artifact example_artifact();

}  // namespace kvq::test
