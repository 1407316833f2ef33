#include <kvq/runtime/kernels/plan_step/launch.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/plan_step/kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>

namespace kvq {

Status load_plan_step() { return cuda_status(load_kernel(plan_step::plan_step_kernel), "plan_step: load"); }

Status run_plan_step(const PlanStepParams& params, CUstream_st* stream) {
  const int rows = std::max(params.num_tokens, params.batch);
  if (rows == 0) return {};
  const int blocks = (rows + plan_step::kThreads - 1) / plan_step::kThreads;
  return cuda_status(launch_kernel(plan_step::plan_step_kernel, dim3(static_cast<unsigned>(blocks)),
                                   plan_step::kThreads, 0, false, stream, params),
                     "plan_step: launch");
}

}  // namespace kvq
