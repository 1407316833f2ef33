#include "support/run_tests.h"

#include <kvq/compute/cuda_library.h>

#include <cstdio>

int main(int argc, char** argv) {
  const kvq::CudaLibrary library;
  if (library.num_devices() == 0) {
    std::printf("kvq-test-cuda: no CUDA device here (%s): skipped\n", library.why_not().c_str());
    return 77;
  }
  return kvq::test::run_tests(argc, argv);
}
