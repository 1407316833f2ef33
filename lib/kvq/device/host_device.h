#pragma once

#include <kvq/plan/page_layout.h>

/// What functions that the host and kernels share need of either.
namespace kvq {

/// min() and max() of integers. On the device these are its built-in functions, for which nvcc makes other code than
/// for a comparison.
KVQ_HD inline int smaller(int a, int b) {
#ifdef __CUDA_ARCH__
  return min(a, b);
#else
  return a < b ? a : b;
#endif
}
KVQ_HD inline int larger(int a, int b) {
#ifdef __CUDA_ARCH__
  return max(a, b);
#else
  return a > b ? a : b;
#endif
}
KVQ_HD inline unsigned smaller(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
  return min(a, b);
#else
  return a < b ? a : b;
#endif
}

}  // namespace kvq
