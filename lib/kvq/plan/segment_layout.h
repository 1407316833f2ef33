#pragma once

#include <cstdint>

/// Keys of mixed widths with codebook codes, as tuned kernels multiply them: products of bits, as of one width
/// (table_layout.h). The words of a product are those of the row, then *derived* words, each the exclusive or of three
/// planes of a unit. Planes of short units do not begin at words, so a program says for each head where they are.
namespace kvq {

constexpr int kSegmentRowWords = 12;  ///< of rows that tuned kernels read: 3 bits a channel at head_dim 128
constexpr int kDerivedWords = 12;     ///< at most
constexpr int kSegmentWords = kSegmentRowWords + kDerivedWords;
constexpr int kMostSegments = 4;
constexpr int kSegmentChunks = kSegmentWords / 8;

/// The rows of one KV head.
struct SegmentProgram {
  /// Of each scale the bits that it belongs to, in all words of a product. Rows with one scale: the first has all.
  std::uint32_t masks[kMostSegments][kSegmentWords];
  std::uint16_t planes[kDerivedWords][4];  ///< first bits in the row of the three planes of a derived word; then 0
  std::uint32_t active;                    ///< bit 3 i + c: scale i has bits in chunk c of eight words
};

}  // namespace kvq
