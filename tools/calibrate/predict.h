#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/methods/options.h>
#include <kvq/stats/collect.h>

namespace kvq {

/// Estimated time, memory and artifact size of a run.
struct Prediction {
  double gemm_gflops = 0.0;  ///< single-precision rate of all threads together, measured for a tenth of a second
  int threads = 1;
  double seconds = 0.0;
  double peak_bytes = 0.0;
  double artifact_bytes = 0.0;
};
Prediction predict(const Dump& dump, const std::vector<LayerEntry>& layers, const StatsRequest& request,
                   const Options& options, std::int64_t tokens, int threads);

}  // namespace kvq
