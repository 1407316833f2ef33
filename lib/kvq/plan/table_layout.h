#pragma once

#include <kvq/plan/page_layout.h>

#include <cstdint>

/// Codebook codes in tuned kernels: keys of one width are multiplied as bits. Values, and keys of mixed widths, are
/// looked up (LevelTable).
///
/// Products of bits: if a codebook of b bits is symmetric about 0, C[c] = -C[2^b - 1 - c], each entry is a sum over the
/// *odd sets* of its code's bits, those of one and of three bits:
///
///   C[c] = sum over odd sets S of weight[S] x[S],   x[S] = +1/2 or -1/2: the exclusive or of the bits in S
///
/// (O'Donnell, Analysis of Boolean Functions, section 1.2: the Fourier expansion of an odd function.) So a row is
/// linear in 2^(b-1) bits a channel, b of which are stored. All channels of a head have the same weights.
namespace kvq {

constexpr int kTableHeadDim = 128;  ///< of rows that tuned kernels read
constexpr int kTableUnits = kTableHeadDim / kUnitChannels;

KVQ_HD constexpr bool has_table_kernels(int bits) { return bits == 3 || bits == 4; }
KVQ_HD constexpr int odd_sets(int bits) { return 1 << (bits - 1); }
/// The bits of odd set number `i`: first the single bits, then sets of three.
KVQ_HD constexpr int odd_set(int bits, int i) {
  if (i < bits) return 1 << i;
  return bits == 3 ? 7 : 15 & ~(8 >> (i - bits));
}

constexpr int kMostLevelBits = 4, kMostLevel = 127;
constexpr int kMixedBits = 16;  ///< in the place of a width: rows of several widths
/// The entries of a codebook of up to kMostLevelBits bits as kernels look them up, in registers: each is `step` times a
/// level, a signed integer of 8 bits.
struct LevelTable {
  std::uint32_t levels[4];  ///< byte c: the level of code c; 0 behind the last one
  float step;
  float unused[3];
};

/// Tiles of rows that are one group of codebook codes with one scale of two bytes.
KVQ_HD constexpr TileSide codebook_tiles(int dim, int bits) {
  return {
      .head_dim = dim,
      .bits = 0,
      .group_size = dim,
      .numbers = 1,
      .row_words = dim * bits / 32,
      .table_bits = has_table_kernels(bits) ? bits : 0,
  };
}

/// A word of 32 bits that a key is multiplied by: of each channel of a unit of 32 channels, x of one odd set.
struct TableWord {
  int unit = 0, set = 0;
};
KVQ_HD constexpr int table_words(int bits) { return kTableUnits * odd_sets(bits); }
/// The words in the order of a product's operands. Those of single bits are the row's words; of the others, lane t of a
/// product has those of unit t: one word of three bits, twice two words of four.
KVQ_HD constexpr TableWord table_word(int bits, int word) {
  const int derived = word - kTableUnits * bits;
  if (derived < 0) return {word / bits, word % bits};
  if (bits == 3) return {derived, 3};
  return {derived % 8 / 2, 4 + derived / 8 * 2 + derived % 2};
}

/// Channel of a value that is row `place` mod 16 of channel block `place` div 16. Lane g of eight reads the bytes of a
/// row that have the codes of its channels, for rows g and g + 8 of each block.
KVQ_HD constexpr int table_value_channel(int bits, int place) {
  const int block = place / 16, row = place % 8, half = place / 8 % 2;
  if (bits == 3) return kUnitChannels * (block / 4 * 2 + half) + 4 * row + block % 4;
  return kUnitChannels * (block / 2) + 16 * half + 2 * row + block % 2;
}

}  // namespace kvq
