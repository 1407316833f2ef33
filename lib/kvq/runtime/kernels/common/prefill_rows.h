#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/page_layout.h>
#include <kvq/runtime/kernels/common/dequantize_variant.h>
#include <kvq/runtime/kernels/common/prefill_params.h>

namespace kvq {

/// The workspace of generic prefill attention: for each work tile (a KV head of a sequence), rows of 16-bit
/// numbers in order of position, first the keys, then the values.
struct PrefillRows {
  int k_dim = 128, v_dim = 128;
  static constexpr int kTokens = 32;  ///< of a tile
  KVQ_HD constexpr std::int64_t work_tile_bytes(int tiles) const {
    return std::int64_t{tiles} * kTokens * (k_dim + v_dim) * 2;
  }
  /// Byte offset of a token's row in its work tile.
  KVQ_HD constexpr std::int64_t row(int tiles, int token, bool value) const {
    return value ? (std::int64_t{tiles} * kTokens * k_dim + std::int64_t{token} * v_dim) * 2
                 : std::int64_t{token} * k_dim * 2;
  }
};

/// Writes prefix and chunk of a slab's work tiles to a PrefillRows workspace. @param rows  has the cache's format
Status generic_prefill_rows(const DequantizeVariant& rows, int blocks, const PrefillParams& params,
                            const PrefillSlab& slab, CUstream_st* stream);
/// Number of blocks of generic_prefill_rows() that are resident at once on the current device.
Status generic_prefill_rows_blocks(const DequantizeVariant& rows, int& blocks);

}  // namespace kvq
