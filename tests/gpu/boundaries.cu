#include "boundaries.h"

#include "device_memory.h"

#include <kvq/runtime/kernels/common/quantize/boundaries.cuh>

namespace kvq::test {

namespace {

__global__ void find_boundaries(const Quotient* quotients, float* boundaries, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) boundaries[i] = write::boundary(write::boundary_factor(quotients[i].threshold), quotients[i].divisor);
}

}  // namespace

std::vector<float> boundaries_of(const std::vector<Quotient>& quotients) {
  std::vector<float> result(quotients.size());
  Quotient* from = nullptr;
  float* to = nullptr;
  const std::size_t from_bytes = quotients.size() * sizeof(Quotient), to_bytes = result.size() * sizeof(float);
  check(cudaMalloc(&from, from_bytes), "cudaMalloc"), check(cudaMalloc(&to, to_bytes), "cudaMalloc");
  check(cudaMemcpy(from, quotients.data(), from_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  const int count = static_cast<int>(quotients.size());
  const auto blocks = static_cast<unsigned>((count + kPlainThreads - 1) / kPlainThreads);
  run_kernel("find_boundaries", find_boundaries, dim3(blocks), kPlainThreads, from, to, count);
  check(cudaMemcpy(result.data(), to, to_bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  cudaFree(from), cudaFree(to);
  return result;
}

}  // namespace kvq::test
