#pragma once

#include <kvq/core/status.h>
#include <kvq/runtime/kernels/decode/params.h>
#include <kvq/runtime/kernels/plain/format.h>

#include <span>

struct CUstream_st;

namespace kvq {

/// What a launch needs to know of one variant on one device.
struct DecodeLaunch {
  CacheFormat format = {};  ///< of the variant
  int heads = 0;            ///< the variant's max_heads
  int blocks = 0;           ///< that run at once
  int multiprocessors = 0;
  int shared_bytes = 0;
  int operand_bytes = 0;     ///< queries of one item, which is one KV head of a sequence
  int record_bytes = 0;      ///< of a partial result
  int shared_records = 0;    ///< partial results beside one of each item
  bool overlapping = false;  ///< kernels of a call may start before the one before has ended
};

/// Bytes of the workspace before the arrivals.
inline constexpr std::size_t kDecodeClaimBytes = 256;
/// Bytes of the workspace of calls with at most `items` = batch * num_kv_heads.
std::size_t decode_workspace_bytes(const DecodeLaunch& launch, std::size_t items);

/// One row of variants.json, compiled; or the plain kernels for one format.
struct DecodeVariant {
  const char* name = "";
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;  ///< the numbers beside the codes are bfloat16, else fp16
  int max_heads = 0;                        ///< query heads of a KV head: of a row 4, 8 or 16
  bool bf16 = true;                         ///< queries and result are bfloat16, else fp16
  Status (*plan_kernel)(DecodeLaunch& launch) = nullptr;
  Status (*run)(const DecodeLaunch& launch, const DecodeParams& params, CUstream_st* stream) = nullptr;
  bool tuned = true;  ///< a row of variants.json

  /// For the current device.
  Status plan(DecodeLaunch& launch) const {
    launch.format = {k, v, k_bfloat, v_bfloat}, launch.heads = max_heads;
    return plan_kernel(launch);
  }
};

/// All rows that are built.
std::span<const DecodeVariant* const> decode_variants();

/// What a caller has.
struct DecodeKey {
  TileSide k, v;
  bool k_bfloat = false, v_bfloat = false;
  int heads = 0;  ///< query heads of a KV head
  bool bf16 = true;
};

/// The row with the fewest idle heads, or null.
const DecodeVariant* find_decode_variant(const DecodeKey& key);

/// Checks what a launch takes for granted: sizes, alignment, pointers that belong together. Host only; reads no device
/// memory.
Status check_decode(const DecodeVariant& variant, const DecodeParams& params);

}  // namespace kvq
