#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq::test {

/// A small artifact with every feature that format 1.1 adds: mixed widths by block and by channel, codebooks shared and
/// per head, trellises, centroids of both scopes, a budget. Has layers 0 and 1 of 3; layer 2 is symmetric.
Artifact featured_artifact();

/// Fails the running test unless all features of 1.1 are equal, down to the bits of every tensor. check_equal()
/// compares all other parts.
void check_equal_features(const Artifact& a, const Artifact& b);

}  // namespace kvq::test
