#pragma once

#include <kvq/plan/page_layout.h>

#include <cstdint>

/// Keys of mixed widths with codebook codes, as tuned kernels multiply them: products of bits, as of one width
/// (table_layout.h). The words of a product are those of the row, then *derived* words, each the exclusive or of three
/// planes of a unit. Planes of short units do not begin at words, so a program says for each head where they are.
namespace kvq {

constexpr int kMostSegments = 4;
constexpr int kMostSegmentBits = 4;  ///< of a code, if its codebook's levels are at any distances
constexpr int kMostDerivedWords = 12, kMostSegmentWords = 24, kMostSegmentChunks = kMostSegmentWords / 8;

/// Whether tuned kernels read rows of so many words: of 2 or of 3 bits a channel at head_dim 128, on average.
KVQ_HD constexpr bool is_segment_row(int row_words) { return row_words == 8 || row_words == 12; }
/// Derived words of a product, at most: as many as fill chunks of eight words.
KVQ_HD constexpr int derived_words(int row_words) { return row_words == 8 ? 8 : 12; }
/// All words of a product.
KVQ_HD constexpr int segment_words(int row_words) { return row_words + derived_words(row_words); }

/// The rows of one KV head.
struct SegmentProgram {
  /// Of each scale the bits that it belongs to, in all words of a product. Rows with one scale: the first has all.
  std::uint32_t masks[kMostSegments][kMostSegmentWords];
  std::uint16_t planes[kMostDerivedWords][4];  ///< first bits in the row of a derived word's three planes; then 0
  std::uint32_t active;  ///< bit kMostSegmentChunks i + c: scale i has bits in chunk c of eight words
};

}  // namespace kvq
