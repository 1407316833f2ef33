#include "support/run_tests.h"

#include "decode_case.h"

#include <cstdio>

int main(int argc, char** argv) {
  if (!kvq::test::have_device()) {
    std::puts("kvq-test-gpu: no CUDA device here: skipped");
    return 77;
  }
  return kvq::test::run_tests(argc, argv);
}
