#pragma once

#include "calibrate/predicted_case.h"

#include <kvq/methods/options.h>
#include <kvq/stats/collect.h>

namespace kvq {

/// Estimated time, memory and artifact size of a run.
struct Prediction {
  double gemm_gflops = 0.0;  ///< single-precision rate of all threads together, measured now if not given
  int threads = 1;
  double read_bytes = 0.0;     ///< of q, k and v
  double collect_flops = 0.0;  ///< of statistics
  // What a run does, one after the other; what runs beside it is not in here.
  double start_seconds = 0.0, collect_seconds = 0.0, decide_seconds = 0.0;
  double seconds = 0.0;
  double peak_bytes = 0.0;
  double device_bytes = 0.0;  ///< of each device
  double artifact_bytes = 0.0;
};
/// @param threads  0: all processors
/// @throws Error{unsupported} as a run does, if the memory limit has no room for the smallest batch
Prediction predict(const PredictedInput& input, const StatsRequest& request, const Options& options,
                   const PredictedMachine& machine, int threads, bool decides);

}  // namespace kvq
