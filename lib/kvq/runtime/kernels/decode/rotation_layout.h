#pragma once

#include <kvq/plan/page_layout.h>

namespace kvq {

/// Layout of a dense rotation [D, D] for the kernels that multiply queries and
/// results: each element as two bfloat16 parts, the rounded element (high) and its rounding error (low), in the order
/// of the lanes' operands of a product. The columns of the matrix are the operand's rows, sixteen to a *column tile*; a
/// *step* of the product's sum takes sixteen rows. Lane 4 g + t holds columns 2 g and 2 g + 1, and rows 4 t to 4 t + 3
/// of a step: four words, each of two rows. The lane reads channels of query rows in the same order.
struct DecodeRotationLayout {
  int head_dim = 128;

  KVQ_HD constexpr int steps() const { return head_dim / 16; }
  KVQ_HD constexpr int bytes() const { return head_dim * head_dim * 4; }
  /// Offset of a lane's sixteen bytes. @param part  0 high, 1 low
  KVQ_HD constexpr int lane_offset(int column_tile, int step, int part, int lane) const {
    return (((column_tile * steps() + step) * 2 + part) * 32 + lane) * 16;
  }
  /// Offset of an element.
  KVQ_HD constexpr int offset(int row, int column, int part) const {
    const int lane = column % 16 / 2 * 4 + row % 16 / 4, word = row % 4 / 2 * 2 + column % 2;
    return lane_offset(column / 16, row / 16, part, lane) + word * 4 + row % 2 * 2;
  }
};

}  // namespace kvq
