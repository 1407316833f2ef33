#pragma once

#include <kvq/runtime/kernels/common/dequantize_variant.h>
#include <kvq/runtime/kernels/common/prefill_params.h>

#include <cstdint>
#include <span>

namespace kvq {

/// Upper bounds for all calls with one plan.
struct PrefillShape {
  int batch = 0, num_q_heads = 0, num_kv_heads = 0;
  int max_queries = 0;               ///< of a sequence's chunk
  int max_keys = 0;                  ///< of a sequence: prefix and chunk
  std::int64_t workspace_bytes = 0;  ///< limit that is kept if one work tile fits; 0 = as much as all work tiles take
  bool portable = false;             ///< use the kernel for every architecture, even where there is a faster one
};

/// Sizes of one shape on one device, for launches; PrefillVariant::plan() fills it.
struct PrefillLaunch {
  PrefillShape shape = {};
  DequantizeLaunch dequantize = {};
  bool sm90 = false;  ///< the kernel for Hopper
  int shared_bytes = 0;
  PrefillSlab slab = {};             ///< of each launch; the last one may have fewer work tiles
  std::int64_t workspace_bytes = 0;  ///< size that is needed
};

/// Divides the work of `launch.shape` into slabs that keep within its workspace, one work tile at least.
/// @param block_rows  rows of a work tile that one thread block attends for
/// @param tile_bytes  of keys and values of `tile_tokens` tokens of a work tile
void take_slab(PrefillLaunch& launch, int block_rows, int tile_tokens, std::int64_t tile_bytes);

/// A tuned variant (an entry of variants.json) or the generic kernels: attention over the workspace, which
/// does not depend on the cache's format.
struct PrefillVariant {
  const char* name = "";
  int head_dim = 0;
  bool bf16 = true;  ///< queries, new keys and values, results and the workspace are bfloat16, else fp16
  /// Fills `launch` for the current device. Call check_prefill_shape() first.
  /// @param launch  in: `shape`
  Status (*plan)(const DequantizeVariant& rows, PrefillLaunch& launch) = nullptr;
  /// For one slab after the other: writes keys and values of the slab's work tiles to the workspace and attends to
  /// them.
  Status (*run)(const DequantizeVariant& rows, const PrefillLaunch& launch, const PrefillParams& params,
                CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< an entry of variants.json; else generic
};

/// All tuned variants that are built.
std::span<const PrefillVariant* const> prefill_variants();

/// The tuned variant for the output of a dequantize variant (`rows`), or null.
const PrefillVariant* find_prefill_variant(const DequantizeVariant& rows);

/// Generic attention over rows of the generic dequantize kernel, even if `rows` is tuned.
PrefillVariant generic_prefill(const DequantizeVariant& rows);

/// Checks the preconditions of a plan. Host only.
Status check_prefill_shape(const PrefillVariant& variant, const DequantizeVariant& rows, const PrefillShape& shape);

/// Checks the preconditions of a launch: sizes, alignment, pointers that belong together. Host only; reads no device
/// memory, so the caller must know that chunks and prefixes are within the plan's shape. Tokens beyond it are ignored.
Status check_prefill(const PrefillVariant& variant, const DequantizeVariant& rows, const PrefillLaunch& launch,
                     const PrefillParams& params);

}  // namespace kvq
