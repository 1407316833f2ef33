#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/plan_step/params.h>

struct CUstream_st;

namespace kvq {

/// Checks what a launch takes for granted, and that the ring has room for `max_rollback`. Host only; reads no device
/// memory.
Status check_plan_step(const PlanStepParams& params);

/// Loads the kernel onto the current device.
Status load_plan_step();

/// One launch, which may be captured.
Status run_plan_step(const PlanStepParams& params, CUstream_st* stream);

}  // namespace kvq
