#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/common/format.h>

struct CUstream_st;

/// A dequantize kernel; prefill attention needs one, too, because it dequantizes the prefix into its workspace.
namespace kvq {

struct DequantizeParams;
struct PrefillParams;
struct PrefillSlab;

/// The sides whose rows the tuned kernels for bit tiles decode (TunedRows::coded); rows of the other sides are linear.
struct DecodedSides {
  bool k = false, v = false;
  constexpr bool any() const { return k || v; }
};

/// Sizes of one variant on one device, for launches; DequantizeVariant::plan() fills it.
struct DequantizeLaunch {
  CacheFormat format = {};    ///< of the variant
  DecodedSides decoded = {};  ///< likewise
  int blocks = 0;             ///< that are resident at once
  int shared_bytes = 0;
  int decoding_blocks = 0;  ///< likewise of the kernel that decodes rows
};

/// A tuned variant, one entry of variants.json; or the kernels for bit tiles or the generic one for one format.
struct DequantizeVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< scales and minima are bfloat16, else fp16
  bool bf16 = true;                         ///< rows are written as bfloat16, else fp16
  Status (*plan_kernel)(DequantizeLaunch& launch) = nullptr;
  Status (*run)(const DequantizeLaunch& launch, const DequantizeParams& params, CUstream_st* stream) = nullptr;
  /// Writes prefix and chunk of a slab's work tiles to the workspace of prefill attention; null if no PrefillTiles
  /// exist for the head_dim.
  Status (*to_tiles)(const DequantizeLaunch& launch, const PrefillParams& params, const PrefillSlab& slab,
                     CUstream_st* stream) = nullptr;
  bool tuned = true;          ///< an entry of variants.json, or of bit tiles (is_bits()); else generic
  DecodedSides decoded = {};  ///< of bit tiles, if tuned

  CacheFormat format() const { return {k, v, k_bfloat, v_bfloat}; }
  /// Fills `launch` for the current device.
  Status plan(DequantizeLaunch& launch) const {
    launch.format = format(), launch.decoded = decoded;
    return plan_kernel(launch);
  }
};

}  // namespace kvq
