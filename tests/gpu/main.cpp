#define CATCH_CONFIG_RUNNER
#include "decode_case.h"

#include <catch2/catch.hpp>

#include <cstdio>

int main(int argc, char** argv) {
  if (!kvq::test::have_device()) {
    std::puts("kvq-test-gpu: no CUDA device here: skipped");
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
