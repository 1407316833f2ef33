#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/quantize_write/params.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// What launches need to know of one variant on one device.
struct WriteLaunch {
  int multiprocessors = 0;
  bool overlapping = false;  ///< a kernel may start while the one before still runs
};

/// One row of variants.json, compiled.
struct WriteVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;        ///< the numbers beside the codes are bfloat16, else fp16
  bool bf16 = true;                               ///< rows come as bfloat16, else fp16
  Status (*plan)(WriteLaunch& launch) = nullptr;  ///< for the current device
  Status (*run)(const WriteLaunch& launch, const WriteParams& params, CUstream_st* stream) = nullptr;
};

/// All rows that are built.
std::span<const WriteVariant* const> write_variants();

/// Checks what a launch takes for granted. Host only; reads no device memory.
Status check_write(const WriteVariant& variant, const WriteParams& params);

}  // namespace kvq
