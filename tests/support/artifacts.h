#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq::test {

/// A small artifact with everything that the format has: dense, block Hadamard and identity rotations, all coders, centres,
/// clips, a shared rotation, an exact layer, a layer without values. Layers 0, 1 and 4 of 6.
Artifact example_artifact();

/// Fails the running test unless both are equal, down to the bits of every tensor.
void check_equal(const LayerPlan& a, const LayerPlan& b);
void check_equal(const Artifact& a, const Artifact& b);

}  // namespace kvq::test
