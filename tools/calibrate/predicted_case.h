#pragma once

#include <kvq/dump/dump_file.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

/// What a run would read.
struct PredictedInput {
  std::vector<LayerEntry> layers;
  std::vector<std::int64_t> layer_bytes;  ///< of q, k and v of each layer, as stored
  std::int64_t sequences = 1, tokens = 0;
  bool is_bf16 = true;
};
PredictedInput input_of(const Dump& dump, const std::vector<LayerEntry>& layers, std::int64_t tokens);
/// Layers of one kind, bfloat16, without a dump.
/// @param text  such as "layers=36,q-heads=32,kv-heads=8,head-dim=128"; v-head-dim, window and sequences may follow
/// @throws Error{usage}
PredictedInput input_of_geometry(const std::string& text, std::int64_t tokens);

/// What would compute.
struct PredictedMachine {
  std::string name = "cpu";
  int devices = 0;                ///< GPUs; 0: processors compute
  int cores = 0;                  ///< 0: this machine's
  double core_gflops = 0.0;       ///< single-precision rate of one core; 0: that of a core here is measured
  std::int64_t memory_limit = 0;  ///< of each device; 0: what the verbs want
};
/// @param text  cpu:CORES, cpu:CORES:GFLOPS, h200 or h200:GPUS  @throws Error{usage}
PredictedMachine parse_machine(const std::string& text);

}  // namespace kvq
