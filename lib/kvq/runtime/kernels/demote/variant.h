#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/demote/params.h>
#include <kvq/runtime/kernels/plain/format.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// One row of variants.json, compiled; or the plain kernel for one format.
struct DemoteVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< the numbers beside the codes are bfloat16, else fp16
  Status (*load)() = nullptr;               ///< onto the current device
  Status (*run_kernel)(const DemoteVariant& variant, const DemoteParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< a row of variants.json

  CacheFormat format() const { return {k, v, k_bfloat, v_bfloat}; }
  Status run(const DemoteParams& params, CUstream_st* stream) const { return run_kernel(*this, params, stream); }
};

/// All rows that are built.
std::span<const DemoteVariant* const> demote_variants();

/// Checks what a launch takes for granted. Host only; reads no device memory, so not `layers` either:
/// check_demote_layer() looks at one before it is copied there.
Status check_demote(const DemoteVariant& variant, const DemoteParams& params);
Status check_demote_layer(const DemoteVariant& variant, const DemoteLayer& layer);

}  // namespace kvq
