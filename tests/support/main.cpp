// The main() of all test programs: Catch2's, with a fixed seed for rapidcheck, so that every run tries the same cases.
// RC_PARAMS="seed=... max_success=..." in the environment sets another seed; a failing property prints its RC_PARAMS.

#include "run_tests.h"

#include <stdlib.h>

int main(int argc, char* argv[]) {
  ::setenv("RC_PARAMS", "seed=20260518", 0);
  return kvq::test::run_tests(argc, argv);
}
