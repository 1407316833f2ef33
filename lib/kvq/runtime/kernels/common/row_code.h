#pragma once

#include <kvq/plan/page_layout.h>

#include <cstdint>

/// What generic kernels know of coded rows beside the sizes of their tiles: plain structs in device memory, made on the
/// host by row_code_data.h.
namespace kvq {

enum class CodeKind : std::int32_t { affine, symmetric, codebook, trellis };

/// A segment of a row in bit tiles. Its groups follow each other, each coded for itself.
struct RowSegment {
  BitSegment place = {};
  CodeKind kind = CodeKind::symmetric;
  int group_size = 0;    ///< channels of a group, at most those of the segment
  int first_number = 0;  ///< number of the row that is the first group's scale; of rows with one scale 0
  int memory = 0;        ///< of a trellis
  int table = 0;         ///< first element in RowCode::tables. Codebook: [2^b] entries, then [2^b - 1] thresholds;
                         ///< trellis: [2^(b (m + 1))] values by window, the channel's own code lowest
  float gain = 1.0f;     ///< of rows with one scale
};

/// The rows of one KV head.
struct HeadRows {
  static constexpr int kMostSegments = 8;
  int num_segments = 0;
  int groups = 0;  ///< of affine codes: the number of the first minimum or zero point
  RowSegment segments[kMostSegments] = {};
};

/// The rows of one side. All null for exact rows, and for code tiles without centroids.
struct RowCode {
  // bit tiles
  const HeadRows* heads = nullptr;  ///< [Hkv]
  const float* tables = nullptr;
  bool one_scale = false;  ///< a row has one scale (packing.md, "One scale a row")
  int survivor_bytes = 0;  ///< that the search of a trellis needs at most (trellis_survivor_bytes())

  // centroids
  int num_centroids = 0;
  bool joint = false;                        ///< one index for all heads of a token
  bool per_head = false;                     ///< centroids are [Hkv, C, D], else [1, C, D]
  const float* centroids = nullptr;          ///< unrotated, for writing
  const float* rotated_centroids = nullptr;  ///< M @ A, for reading: a row is read in the basis of x @ A
};

/// Bytes of the survivors of a trellis's search in a group: one for each step and state. The seam's run has steps for
/// up to 2 * 32 channels.
constexpr int kSeamLength = 32;
KVQ_HD constexpr int trellis_survivor_bytes(int bits, int memory, int channels) {
  const int seam = 2 * (channels < kSeamLength ? channels : kSeamLength);
  return (channels > seam ? channels : seam) << (bits * memory);
}
constexpr int kMostTrellisStates = 256;

}  // namespace kvq
