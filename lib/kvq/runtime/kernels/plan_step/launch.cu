#include <kvq/runtime/kernels/plan_step/launch.h>
#include <kvq/runtime/kernels/plan_step/kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>

namespace kvq {

Status run_plan_step(const PlanStepParams& params, CUstream_st* stream) {
  const int rows = std::max(params.num_tokens, params.max_demotions);
  if (rows == 0) return {};
  const int blocks = (rows + plan_step::kThreads - 1) / plan_step::kThreads;
  plan_step::plan_step_kernel<<<static_cast<unsigned>(blocks), plan_step::kThreads, 0, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{}
                              : Status::fail(StatusCode::cuda, "plan_step: launch: %s", cudaGetErrorString(error));
}

}  // namespace kvq
