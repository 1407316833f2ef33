#include <kvq/compute/cuda_library.h>

#include "support/backend_conformance.h"

#include <catch2/catch.hpp>

#include <numeric>

namespace kvq::test {

namespace {

std::unique_ptr<Backend> cuda_backend() {
  const int device = 0;
  return CudaLibrary().make_backend(std::span(&device, 1));
}

}  // namespace

TEST_CASE("The CUDA backend keeps the bounds of all backends") {
  const auto backend = cuda_backend();
  check_conformance(*backend);
}

}  // namespace kvq::test
