#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/demote/params.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// A tuned variant, one entry of variants.json; or the generic kernel for one format.
struct DemoteVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< scales and minima are bfloat16, else fp16
  Status (*load)() = nullptr;               ///< loads the kernel onto the current device
  Status (*run_kernel)(const DemoteVariant& variant, const DemoteParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< an entry of variants.json; else generic

  CacheFormat format() const { return {k, v, k_bfloat, v_bfloat}; }
  Status run(const DemoteParams& params, CUstream_st* stream) const { return run_kernel(*this, params, stream); }
};

/// All tuned variants that are built.
std::span<const DemoteVariant* const> demote_variants();

/// The generic variant of one format, for which generic_supports() must be true.
DemoteVariant generic_demote(const CacheFormat& format);

/// Checks the preconditions of a launch. Host only; reads no device memory, so not `layers` either:
/// check_demote_layer() checks a layer before its DemoteLayer is copied to the device.
Status check_demote(const DemoteVariant& variant, const DemoteParams& params);
Status check_demote_layer(const DemoteVariant& variant, const DemoteLayer& layer);

}  // namespace kvq
