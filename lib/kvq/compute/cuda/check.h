#pragma once

#include <kvq/core/error.h>

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <cusolverDn.h>

#include <fmt/format.h>

/// Status codes of CUDA's libraries as errors. `what` is the step that failed, such as "attention moments".
namespace kvq::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error{ErrorKind::io, fmt::format("CUDA device: {}: {}", what, cudaGetErrorString(status)),
                "--device cpu needs no GPU"};
}
inline void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error{ErrorKind::io, fmt::format("CUDA device: {}: {}", what, cublasGetStatusString(status)),
                "--device cpu needs no GPU"};
}
inline void check(cusolverStatus_t status, const char* what) {
  if (status != CUSOLVER_STATUS_SUCCESS)
    throw Error{ErrorKind::io, fmt::format("CUDA device: {}: cuSOLVER status {}", what, static_cast<int>(status)),
                "--device cpu needs no GPU"};
}

}  // namespace kvq::cuda
