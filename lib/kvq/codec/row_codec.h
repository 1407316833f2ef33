#pragma once

#include <kvq/codec/group_coder.h>
#include <kvq/codec/row_scale.h>
#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvq {

/// Quantizes and dequantizes rows x_rot of one KV head, for any coder and widths: a plan compiled for repeated use.
class RowCodec {
 public:
  /// @param plan  valid; copied as far as needed
  RowCodec(const TensorPlan& plan, int kv_head, int dim);
  /// For a plan that has only a coder of one width.
  RowCodec(const Coder& coder, double clip_ratio, int dim);

  int dim() const { return dim_; }
  /// Number of scales and minima of one row.
  int num_numbers() const { return num_numbers_; }
  const RowLayout& layout() const { return layout_; }

  /// @param row      [D], poisoned if a channel is not finite (poisoned.h); @param codes [D]
  /// @param numbers  [num_numbers()]. Not for exact rows, which have no codes.
  void encode(std::span<const float> row, std::span<std::uint8_t> codes, std::span<float> numbers) const;
  void decode(std::span<const std::uint8_t> codes, std::span<const float> numbers, std::span<float> out) const;

  /// Bytes of one row; `bytes` is the side's row size, at least layout().row_bytes. `centroid` is 0 without centroids;
  /// a poisoned row stores 0 in any case.
  void pack(std::span<const std::uint8_t> codes, std::span<const float> numbers, int centroid,
            std::span<std::byte> bytes) const;
  int unpack(std::span<const std::byte> bytes, std::span<std::uint8_t> codes, std::span<float> numbers) const;

  /// Quantizes and dequantizes one row in place.
  void quantize(std::span<float> row) const;

  // What the codec does, for backends that do the same elsewhere.
  using Group = ChannelGroup;
  bool is_exact() const { return exact_; }
  /// Uniform codes of one width, whose groups follow each other; then there are no groups(). Else null.
  const UniformCoder* uniform() const { return uniform_ ? &*uniform_ : nullptr; }
  double clip_ratio() const { return clip_ratio_; }
  /// Channels of no group become 0.
  std::span<const Group> groups() const { return groups_; }
  /// Rule and type of the row's one scale; null if each group has a scale.
  const RowScale* row_scale() const { return row_scale_ ? &*row_scale_ : nullptr; }

 private:
  struct Compile;

  int dim_ = 0, num_numbers_ = 0;
  bool exact_ = false;
  std::optional<UniformCoder> uniform_;  ///< uniform codes of one width: encode_row() needs the whole row for the clip
  std::optional<RowScale> row_scale_;
  double clip_ratio_ = 1.0;
  ScaleType type_ = ScaleType::fp16;
  RowLayout layout_;
  std::vector<Group> groups_;
};

/// Adds the squared distance of x from each centroid of one head (packing.md, "Centroids") to `sums`. For joint
/// centroids the caller passes the same sums for all heads.
/// @param x  [D] unrotated; @param sums [C] in and out
void add_centroid_distances(const Centroids& centroids, int entry, std::span<const float> x, std::span<float> sums);
/// Index of the centroid of one head that is nearest to x, the lowest of equal ones.
int nearest_centroid(const Centroids& centroids, int entry, std::span<const float> x);

}  // namespace kvq
