#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/decode/schedule.h>
#include <kvq/runtime/kernels/decode/workspace.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// Sizes and limits of one variant on one device, for launches; DecodeVariant::plan() fills it.
struct DecodeLaunch {
  CacheFormat format = {};  ///< of the variant
  int heads = 0;            ///< the variant's max_rows
  int blocks = 0;           ///< of the decode kernel that are resident at once
  int multiprocessors = 0;
  int shared_bytes = 0;
  int operand_bytes = 0;     ///< queries of one work tile: one KV head of a sequence
  int partial_bytes = 0;     ///< of a partial result
  int cut_partials = 0;      ///< partial results in addition to one for each work tile
  bool overlapping = false;  ///< kernels may start before the stream's previous kernel has ended
};

inline DecodeDevice device_of(const DecodeLaunch& launch) {
  return {launch.multiprocessors, launch.blocks, launch.overlapping};
}
/// The workspace of calls with at most so many work tiles, and its bytes.
DecodeWorkspace decode_workspace(const DecodeLaunch& launch, std::size_t work_tiles);
std::size_t decode_workspace_bytes(const DecodeLaunch& launch, std::size_t work_tiles);

struct DecodeVariant;
/// Work tiles of a call: KV heads of all passes.
std::size_t decode_work_tiles(const DecodeVariant& variant, int batch, int num_kv_heads, int heads_per_kv_head,
                              int max_new_tokens);

/// A tuned kernel of variants.json; or the generic kernels for one format.
struct DecodeVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< scales and minima are bfloat16, else fp16
  int max_rows = 0;  ///< of a work tile (DecodePasses): tuned 4, 8 or 16; generic: query heads of a KV head, at most
  bool bf16 = true;  ///< queries and result are bfloat16, else fp16
  Status (*plan_kernel)(DecodeLaunch& launch) = nullptr;
  Status (*run)(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;             ///< an entry of variants.json; else generic
  DecodeKernelShape shape = {};  ///< of generic kernels only what sizes the workspace

  /// Fills `launch` for the current device.
  Status plan(DecodeLaunch& launch) const {
    launch.format = {k, v, k_bfloat, v_bfloat}, launch.heads = max_rows;
    return plan_kernel(launch);
  }
};

/// All tuned variants that are built.
std::span<const DecodeVariant* const> decode_variants();

/// The generic variant of one format, for which generic_supports() must be true. A KV head may have any number of query
/// heads; max_rows of the result is `heads`.
DecodeVariant generic_decode(const CacheFormat& format, int heads, bool bf16);

/// Most new tokens of a sequence.
inline constexpr int kMostNewTokens = 16;

/// The format and head count that a caller needs a variant for.
struct DecodeKey {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  int heads = 0;  ///< query heads of a KV head
  bool bf16 = true;
  int new_tokens = 1;  ///< of a sequence: the variant has rows for all of them, or for as many as any variant
};

/// The tuned variant with the fewest passes, then the fewest padding rows, or null.
const DecodeVariant* find_decode_variant(const DecodeKey& key);

/// Checks the preconditions of a launch: sizes, alignment, pointers that belong together. Host only; reads no device
/// memory.
Status check_decode(const DecodeVariant& variant, const DecodeParams& params);

}  // namespace kvq
