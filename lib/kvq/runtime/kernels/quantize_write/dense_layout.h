#pragma once

#include <kvq/plan/page_layout.h>

#include <cstdint>

namespace kvq {

/// Layout of a dense rotation R [D, D] as an operand of the tensor cores: R in two 16-bit *split halves*, the rounded
/// element (high) and its rounding error (low), in *slabs* of 16 rows (one step of the product's sum). A split half of
/// a slab is made of 8 x 8 core matrices without swizzle, 128 bytes each: rows of R side by side, columns below each
/// other; the two core matrices of the same eight columns are adjacent. Rows and columns are permuted so that a lane
/// multiplies the channels that it loads and gets the channels that struct Rows holds.
struct RotationLayout {
  int head_dim = 128;

  static constexpr int kSplitHalves = 2, kSlabRows = 16;
  KVQ_HD constexpr int slabs() const { return head_dim / kSlabRows; }
  KVQ_HD constexpr int split_half_bytes() const { return kSlabRows * head_dim * 2; }
  KVQ_HD constexpr int slab_bytes() const { return kSplitHalves * split_half_bytes(); }
  KVQ_HD constexpr int bytes() const { return slabs() * slab_bytes(); }

  /// Row of R that is row k of a slab. Lane t of four holds channels 8 t .. 8 t + 7 of each 32. In slab 2 j + half
  /// these are the four from 32 j + 8 t + 4 half on; the operand has them at k = 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  KVQ_HD static constexpr int row_channel(int slab, int k) {
    return 32 * (slab / 2) + 8 * (k % 8 / 2) + 4 * (slab % 2) + 2 * (k / 8) + k % 2;
  }
  /// Column of R that is column n of the operand. Of each eight columns, lane t gets 2 t and 2 t + 1.
  KVQ_HD static constexpr int column_channel(int n) {
    return 32 * (n / 32) + 8 * (n % 8 / 2) + 2 * (n / 8 % 4) + n % 2;
  }
  /// Byte offset of an element. @param split_half  0 high, 1 low
  KVQ_HD constexpr int offset(int slab, int split_half, int k, int n) const {
    return slab * slab_bytes() + split_half * split_half_bytes() + n / 8 * 256 + k / 8 * 128 + n % 8 * 16 + k % 8 * 2;
  }
};

}  // namespace kvq
