#pragma once

#include <kvq/plan/page_layout.h>

namespace kvq {

/// The matrix [B + D, D] by which linear rows are dequantized, as the kernel keeps it in shared memory: for each 64
/// columns a *block*, which a thread block copies. B = 32 row_words rows are of the bits of coded rows, in the order of
/// row_bit(), then D are of the channels of exact rows. Elements are fp16; each column of either part is divided by a
/// power of two, its *factor*. A product's sum takes sixteen rows in a step; a *turn* is two steps, as many rows as a
/// word has bits.
struct LinearRowsLayout {
  int head_dim = 128, row_words = 8;

  static constexpr int kColumns = 64, kTurnBytes = 32 * kColumns * 2;
  KVQ_HD constexpr int turns() const { return row_words + head_dim / 32; }
  KVQ_HD constexpr int block_bytes() const { return turns() * kTurnBytes + 2 * kColumns * 4; }
  KVQ_HD constexpr int bytes() const { return head_dim / kColumns * block_bytes(); }

  /// Offset of an element in its block: registers of two products of lane 4 (column of eight) + t, as in traits.cuh.
  /// @param turn    of bits 0 .. row_words - 1, of channels behind them
  /// @param row     of the step, 0..15
  /// @param column  0..63; a lane gets the sums of eight neighboring ones, 8 t .. 8 t + 7 of 32
  KVQ_HD static constexpr int offset(int turn, int step, int row, int column) {
    const int products = column / 32 * 4 + column % 8 / 2, of_eight = column % 32 / 8 * 2 + column % 2,
              lane = 4 * of_eight + row % 8 / 2, word = products % 2 * 2 + row / 8;
    return turn * kTurnBytes + ((step * 4 + products / 2) * 32 + lane) * 16 + word * 4 + row % 2 * 2;
  }
  /// Offset in the block of the factor (float) of a column. @param part  0 of bits, 1 of channels
  KVQ_HD constexpr int factor_offset(int part, int column) const {
    return turns() * kTurnBytes + (part * kColumns + column) * 4;
  }

  /// The bit of the row that a row of the matrix is of. Lane t has a word for four turns, whose bits 15 - n and 31 - n
  /// are a register of the product's other operand, n = 0..15 in the order of turns, steps and registers. The words are
  /// what lanes find in tiles (linear_rows.cuh). Of the words behind all fours, lanes share two for two turns, then one
  /// for a turn: eight or four bits of each half.
  KVQ_HD constexpr int row_bit(bool value, int turn, int step, int row) const {
    const int eights = row_words / 8 * 8, chunked = row_words / 4 * 4, t = row % 8 / 2;
    const bool is_single = turn >= chunked && turn == row_words - 1 && row_words % 2 != 0;
    const int first = turn < chunked ? turn % 4 : is_single ? 0 : turn - chunked;
    const int place = 15 + row % 2 * 16 - (4 * first + 2 * step + row / 8);
    if (turn < chunked) {
      const int run = turn / 4;
      if (value) return 8 * (16 * run + place / 16 * 8 + 2 * t + place / 8 % 2) + place % 8;
      return 32 * (4 * run < eights ? run / 2 * 8 + 2 * t + run % 2 : eights + t) + place;
    }
    if (value)
      return is_single ? 8 * (4 * turn + t) + (place < 16 ? place - 12 : place - 24)
                       : 8 * (4 * chunked + place / 16 * 4 + t) + place % 8;
    return is_single ? 32 * turn + place - 4 * t : 32 * (chunked + t % 2) + place - 8 * (t / 2);
  }
  /// The channel that a row is of. @param turn  behind those of bits, from 0 on
  KVQ_HD static constexpr int row_channel(int turn, int step, int row) {
    return 32 * turn + row % 8 / 2 * 8 + step * 4 + row / 8 * 2 + row % 2;
  }
};

}  // namespace kvq
