// The one main of all test programs: Catch2's, with rapidcheck's seed fixed so that every run tries the same cases.
// RC_PARAMS="seed=... max_success=..." in the environment tries others; a failure prints what reproduces it.

#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

#include <stdlib.h>

int main(int argc, char* argv[]) {
  ::setenv("RC_PARAMS", "seed=20260518", 0);
  return Catch::Session().run(argc, argv);
}
