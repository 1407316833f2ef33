#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/dequantize/params.h>
#include <kvq/runtime/kernels/plain/format.h>
#include <kvq/runtime/kernels/prefill/params.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// What a launch needs to know of one variant on one device.
struct DequantizeLaunch {
  CacheFormat format = {};  ///< of the variant
  int blocks = 0;           ///< that run at once
  int shared_bytes = 0;
};

/// One row of variants.json, compiled; or the plain kernel for one format.
struct DequantizeVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< the numbers beside the codes are bfloat16, else fp16
  bool bf16 = true;                         ///< rows come out as bfloat16, else fp16
  Status (*plan_kernel)(DequantizeLaunch& launch) = nullptr;
  Status (*run)(const DequantizeLaunch& launch, const DequantizeParams& params, CUstream_st* stream) = nullptr;
  /// Prefix and chunk of a slab's items into the workspace of prefill attention; null if head_dim has no such tiles.
  Status (*to_tiles)(const DequantizeLaunch& launch, const PrefillParams& params, const PrefillSlab& slab,
                     CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< a row of variants.json

  CacheFormat format() const { return {k, v, k_bfloat, v_bfloat}; }
  /// For the current device.
  Status plan(DequantizeLaunch& launch) const {
    launch.format = format();
    return plan_kernel(launch);
  }
};

/// All rows that are built.
std::span<const DequantizeVariant* const> dequantize_variants();

/// What a caller has.
struct DequantizeKey {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  bool bf16 = true;
};

/// The row of exactly this, or null.
const DequantizeVariant* find_dequantize_variant(const DequantizeKey& key);

/// Checks what a launch takes for granted: sizes, alignment, pointers that belong together. Host only; reads no device
/// memory.
Status check_dequantize(const DequantizeVariant& variant, const DequantizeParams& params);

/// The part of these checks that is about the cache. @param verb  whom a message is from
Status check_cache(const char* verb, const DequantizeVariant& variant, const PackedCache& cache);

}  // namespace kvq
