#pragma once

#include <kvq/plan/page_layout.h>

namespace kvq {

/// Where an element of a dense rotation [D, D] lies for the kernels that rotate queries and results: two bfloat16
/// parts, the rounded element and what is left of it, in the order in which lanes hold them as operands of a product.
/// The columns of the matrix are the operand's rows, sixteen to a *tile*; a *step* of the product's sum takes sixteen
/// rows. Lane 4 g + t holds columns 2 g and 2 g + 1, and of a step's rows the four from 4 t on: four words, each of two
/// rows, which is the order in which it reads rows of queries as well.
struct DecodeRotationLayout {
  int head_dim = 128;

  KVQ_HD constexpr int steps() const { return head_dim / 16; }
  KVQ_HD constexpr int bytes() const { return head_dim * head_dim * 4; }
  /// Byte of a lane's sixteen. @param part  0 is the high one
  KVQ_HD constexpr int lane_offset(int tile, int step, int part, int lane) const {
    return (((tile * steps() + step) * 2 + part) * 32 + lane) * 16;
  }
  /// Byte of an element.
  KVQ_HD constexpr int offset(int row, int column, int part) const {
    const int lane = column % 16 / 2 * 4 + row % 16 / 4, word = row % 4 / 2 * 2 + column % 2;
    return lane_offset(column / 16, row / 16, part, lane) + word * 4 + row % 2 * 2;
  }
};

}  // namespace kvq
