#pragma once

#include <kvq/runtime/kernels/demote/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/demote/kernel.cuh>

#include <cuda_runtime.h>

#include <algorithm>

namespace kvq {

template <typename K, typename V>
Status load_demote() {
  return cuda_status(load_kernel(demote::demote_kernel<K, V>), "demote: load");
}

template <typename K, typename V>
Status run_demote(const DemoteVariant&, const DemoteParams& params, CUstream_st* stream) {
  if (params.max_demotions == 0 || params.num_layers == 0) return {};
  const int runs = (params.max_demotions + kTileTokens - 1) / kTileTokens;
  const dim3 grid(static_cast<unsigned>(std::min(runs, demote::kMaxRuns)),
                  static_cast<unsigned>((2 * params.num_kv_heads + write::kWarps - 1) / write::kWarps),
                  static_cast<unsigned>(params.num_layers));
  return cuda_status(launch_kernel(demote::demote_kernel<K, V>, grid, 32 * write::kWarps, 0, false, stream, params),
                     "demote: launch");
}

template <typename K, typename V>
DemoteVariant demote_variant(const char* name) {
  return {name, K::side(), V::side(), K::kBfloat, V::kBfloat, load_demote<K, V>, run_demote<K, V>};
}

}  // namespace kvq
