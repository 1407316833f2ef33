#pragma once

#include <kvq/runtime/kernels/dequantize/variant.h>
#include <kvq/runtime/kernels/prefill/params.h>

#include <cstdint>
#include <span>

namespace kvq {

/// The most that any call with one plan is about.
struct PrefillShape {
  int batch = 0, num_q_heads = 0, num_kv_heads = 0;
  int max_queries = 0;               ///< of a sequence's chunk
  int max_keys = 0;                  ///< of a sequence: prefix and chunk
  std::int64_t workspace_bytes = 0;  ///< to be kept within, if one item fits; 0 = as much as all items take
  bool portable = false;             ///< the kernel for every architecture, even where there is a faster one
};

/// What launches need to know of one shape on one device.
struct PrefillLaunch {
  PrefillShape shape = {};
  DequantizeLaunch dequantize = {};
  bool sm90 = false;  ///< the kernel for Hopper
  int shared_bytes = 0;
  PrefillSlab slab = {};             ///< of each launch; the last one may have fewer items
  std::int64_t workspace_bytes = 0;  ///< that are needed
};

/// Divides the work of `launch.shape` into slabs that keep within its workspace, one item at least.
/// @param block_rows  rows of an item that a block takes
/// @param tile_bytes  of keys and values of `tile_tokens` tokens of an item
void take_slab(PrefillLaunch& launch, int block_rows, int tile_tokens, std::int64_t tile_bytes);

/// One row of variants.json, compiled, or the plain kernels: attention over the workspace, whatever the cache's format.
struct PrefillVariant {
  const char* name = "";
  int head_dim = 0;
  bool bf16 = true;  ///< queries, new keys and values and the result are bfloat16, else fp16; so is the workspace
  /// For the current device. Call check_prefill_shape() first.
  /// @param launch  in: `shape`
  Status (*plan)(const DequantizeVariant& rows, PrefillLaunch& launch) = nullptr;
  /// Keys and values of a slab's items into the workspace, attention over these, slab after slab.
  Status (*run)(const DequantizeVariant& rows, const PrefillLaunch& launch, const PrefillParams& params,
                CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< a row of variants.json
};

/// All rows that are built.
std::span<const PrefillVariant* const> prefill_variants();

/// The row that goes with these rows of a cache, or null.
const PrefillVariant* find_prefill_variant(const DequantizeVariant& rows);

/// Checks what a plan takes for granted. Host only.
Status check_prefill_shape(const PrefillVariant& variant, const DequantizeVariant& rows, const PrefillShape& shape);

/// Checks what a launch takes for granted: sizes, alignment, pointers that belong together. Host only; reads no device
/// memory, so that chunks and prefixes must be known to be within the plan's shape: of longer ones the end is ignored.
Status check_prefill(const PrefillVariant& variant, const DequantizeVariant& rows, const PrefillLaunch& launch,
                     const PrefillParams& params);

}  // namespace kvq
