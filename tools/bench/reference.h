#pragma once

#include "bench/cases.h"

#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/plan/layer_pages.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

/// Converts between the kernels' parameters and the types of the reference codec.
namespace kvq::bench {

/// The coder of a side. @param symmetric_rule  scale rule if the side has no minima
UniformCoder coder_of(const TileSide& side, bool bfloat, ScaleRule symmetric_rule = ScaleRule::norm);
inline ScaleType number_type(bool bfloat) { return bfloat ? ScaleType::bf16 : ScaleType::fp16; }

/// Plan of a single head whose rows fill the words of a side in bit tiles. One number: codebook codes of
/// side.table_bits, or, if these are 0, linear rows (plan/linear_rows.h), trellis codes of one or two neighboring
/// widths. More numbers: as many segments of codebook codes, as Block-GTQ has them.
/// @param memory  of the trellises, 1 to 3; widths with fewer in packing.md have those. 0: rows of 2 bits are codes of
/// a Lloyd-Max codebook
TensorPlan bit_plan(const TileSide& side, bool bfloat, int memory, ScaleRule rule);
/// Of a side of a cache.
TensorPlan bit_plan(const CacheShape& shape, Side side);
/// A plan of a single head for so many equal heads.
TensorPlan for_heads(TensorPlan plan, int num_kv_heads);

/// Centroids of a KV head of a side with indices, in the basis of its rows: [kMostTunedCentroids, D].
std::vector<float> centroids_of(const TileSide& tiles, Side side, int kv_head);

/// 16-bit numbers on the device as floats on the host.
std::vector<float> floats_at(const std::uint16_t* from, std::size_t count, bool bf16);

/// Copy of one sequence's cache on the host.
struct HostSequence {
  std::vector<std::byte> pages;        ///< pages in the order of the sequence
  std::vector<std::byte> sinks, ring;  ///< slots; empty without
};

/// Rows of one side and KV head as the codec reads them from a cache, by position; not rotated back.
class StoredRows {
 public:
  StoredRows(const CacheShape& shape, const HostSequence& sequence, Side side, int kv_head);
  /// The span is valid until the next call.
  std::span<const float> at(int position);

 private:
  CacheShape shape_;
  WindowLayouts windows_;
  const HostSequence& sequence_;
  Side which_;
  int head_;
  TileSide side_;
  bool bfloat_;
  std::vector<float> centroids_;      ///< of sides with indices
  std::optional<RowCodec> codec_;     ///< of rows in bit tiles
  std::vector<BitSegment> segments_;  ///< likewise
  std::vector<float> row_, numbers_;
  std::vector<std::uint8_t> codes_;
};

using RowAt = std::function<std::span<const float>(int)>;

/// Attention of one query token over `tokens` rows, in double.
/// @param keys, values            rotated rows by position
/// @param rotation_k, rotation_v  of the KV head, as plans of a single head
/// @param q                       [heads, D] unrotated queries of the heads that share the rows
/// @return                        [heads, D] unrotated
std::vector<double> plain_attention(int tokens, const RowAt& keys, const RowAt& values, const TensorPlan& rotation_k,
                                    const TensorPlan& rotation_v, std::span<const float> q, int head_dim,
                                    double softmax_scale);

/// |found - expected| / |expected|
double relative_error(std::span<const float> found, std::span<const double> expected);

}  // namespace kvq::bench
