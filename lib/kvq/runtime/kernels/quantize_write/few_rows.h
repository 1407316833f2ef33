#pragma once

#include <kvq/runtime/kernels/quantize_write/variant.h>

/// Writes rows of bit tiles of calls with few rows, such as those of a decode step. Each row has a block, and a warp
/// quantizes one or some of its segments: one after the other, the searches of their trellises would take most of the
/// time.
namespace kvq {

/// Loads the kernels for the launch's format onto the current device.
Status plan_few_rows(const WriteLaunch& launch);

/// Whether run_few_rows() takes the keys or values of a call.
/// @param jobs  heads of both sides that the call writes
bool takes_few_rows(const WriteLaunch& launch, const WriteParams& params, bool value, int jobs);

/// Writes jobs that takes_few_rows(), as run_generic_write() does.
Status run_few_rows(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs, bool bf16,
                    CUstream_st* stream);

}  // namespace kvq
