#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

struct CUstream_st;

/// The kernels of pair_rows.h behind the one that rotates rows.
namespace kvq {

/// Loads the kernels for the current device. @param memory  of the trellis
Status plan_pairs(int memory);

/// Searches the rows of `jobs` jobs from WriteParams::pairs.first_job on, and stores them. The kernels do not overlap
/// those before them: blocks that wait would run unevenly over multiprocessors later, which takes up to a third longer.
Status run_pairs(const WriteParams& params, int jobs, CUstream_st* stream);

}  // namespace kvq
