#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/dequantize/variant.h>

namespace kvq {

/// The workspace of plain prefill attention: of each item, a KV head of a sequence, rows of 16-bit numbers in order of
/// position: those of the keys, then those of the values.
struct PrefillRows {
  int k_dim = 128, v_dim = 128;
  static constexpr int kTokens = 32;  ///< a slab's tiles
  KVQ_HD constexpr std::int64_t item_bytes(int tiles) const {
    return std::int64_t{tiles} * kTokens * (k_dim + v_dim) * 2;
  }
  /// Byte of a token's row in its item.
  KVQ_HD constexpr std::int64_t row(int tiles, int token, bool value) const {
    return value ? (std::int64_t{tiles} * kTokens * k_dim + std::int64_t{token} * v_dim) * 2
                 : std::int64_t{token} * k_dim * 2;
  }
};

/// Prefix and chunk of a slab's items into such a workspace. @param rows  the cache's format
Status plain_prefill_rows(const DequantizeVariant& rows, int blocks, const PrefillParams& params,
                          const PrefillSlab& slab, CUstream_st* stream);
/// Blocks of that kernel that run at once on the current device.
Status plain_prefill_rows_blocks(bool bf16, int& blocks);

}  // namespace kvq
