#pragma once

#include <kvq/compute/backend.h>

namespace kvq::test {

/// Checks every verb of a backend against plain loops in double, with the bounds that all backends keep, and that equal
/// calls give equal bytes. A backend passes or fails as CHECKs of the running test.
void check_conformance(Backend& backend);

}  // namespace kvq::test
