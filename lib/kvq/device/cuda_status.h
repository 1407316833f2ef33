#pragma once

#include <kvq/core/status.h>

#include <cuda_runtime.h>

namespace kvq {

/// @param what  prefix of the message, such as "decode: launch"
inline Status cuda_status(cudaError_t error, const char* what) {
  return error == cudaSuccess ? Status{} : Status::fail(StatusCode::cuda, "%s: %s", what, cudaGetErrorString(error));
}

}  // namespace kvq
