#pragma once

#include <kvq/plan/kernel_limits.h>
#include <kvq/runtime/kernels/common/row_code.h>
#include <kvq/runtime/kernels/dequantize/linear_layout.h>

namespace kvq {

/// Shared memory of a block that dequantizes coded rows (coded_rows.cuh).
struct CodedRowsLayout {
  int head_dim = 128, warps = 8;

  /// Rows of the matrix are of channels alone.
  KVQ_HD constexpr LinearRowsLayout matrix() const { return {head_dim, 0}; }

  // Of the block: the matrix, then
  KVQ_HD constexpr int center_at() const { return matrix().bytes(); }
  KVQ_HD constexpr int channels_at() const { return center_at() + head_dim * 4; }
  KVQ_HD constexpr int units_at() const { return channels_at() + head_dim * 16; }
  KVQ_HD constexpr int most_at() const { return units_at() + kMostUnitValues * 4; }
  KVQ_HD constexpr int warps_at() const { return most_at() + kMostRowNumbers * 4; }
  KVQ_HD constexpr int bytes() const { return warps_at() + warps * warp_bytes(); }

  // Of a warp: words, then numbers, then channels of 16 rows
  static constexpr int kWordStride = kMostLinearRowWords + 1;  ///< odd, so that rows lie in different banks
  KVQ_HD constexpr int scales_at() const { return kTileTokens * kWordStride * 4; }
  KVQ_HD constexpr int powers_at() const { return scales_at() + kMostRowNumbers * kTileTokens * 4; }
  KVQ_HD constexpr int rows_at() const { return powers_at() + kTileTokens * 4; }
  KVQ_HD constexpr int row_bytes() const { return head_dim * 2 + 64; }  ///< two rows take all banks
  KVQ_HD constexpr int warp_bytes() const { return rows_at() + kTileTokens * row_bytes(); }

  /// Values of all segments of a row, whose widths differ, and 0 for channels without code.
  static constexpr int kMostUnitValues = 512;
};

}  // namespace kvq
