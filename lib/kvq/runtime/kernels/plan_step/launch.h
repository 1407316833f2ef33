#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/plan_step/params.h>

struct CUstream_st;

namespace kvq {

/// Checks the preconditions of a launch, and that the ring has room for `max_rollback`. Host only; reads no device
/// memory.
Status check_plan_step(const PlanStepParams& params);

/// Loads the kernel onto the current device.
Status load_plan_step();

/// Enqueues the kernel; may be captured in a CUDA graph.
Status run_plan_step(const PlanStepParams& params, CUstream_st* stream);

}  // namespace kvq
