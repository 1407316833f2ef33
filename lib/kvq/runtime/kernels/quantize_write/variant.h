#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/plain/format.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// What launches need to know of one variant on one device.
struct WriteLaunch {
  CacheFormat format = {};  ///< of the variant
  int multiprocessors = 0;
  bool overlapping = false;  ///< a kernel may start while the one before still runs
};

/// One row of variants.json, compiled; or the plain kernel for one format.
struct WriteVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< the numbers beside the codes are bfloat16, else fp16
  bool bf16 = true;                         ///< rows come as bfloat16, else fp16
  Status (*plan_kernel)(WriteLaunch& launch) = nullptr;
  Status (*run)(const WriteLaunch& launch, const WriteParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< a row of variants.json

  /// For the current device.
  Status plan(WriteLaunch& launch) const {
    launch.format = {k, v, k_bfloat, v_bfloat};
    return plan_kernel(launch);
  }
};

/// All rows that are built.
std::span<const WriteVariant* const> write_variants();

/// Checks what a launch takes for granted. Host only; reads no device memory.
Status check_write(const WriteVariant& variant, const WriteParams& params);

}  // namespace kvq
