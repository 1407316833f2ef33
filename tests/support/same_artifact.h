#pragma once

#include <kvq/artifact/artifact.h>

namespace kvq::test {

/// Fails the running test unless `a` and `b` are equal, down to the bits of every tensor.
void check_equal(const LayerPlan& a, const LayerPlan& b);
void check_equal(const Artifact& a, const Artifact& b);

}  // namespace kvq::test
