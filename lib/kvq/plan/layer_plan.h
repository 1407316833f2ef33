#pragma once

#include <kvq/core/geometry.h>
#include <kvq/plan/cache_layout.h>
#include <kvq/plan/rotation.h>
#include <kvq/plan/scheme.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// The codes behind FitError::before: affine, fp16 scales and minima (plain_baseline()).
struct BaselineCodes {
  int bits = 0, group_size = 0;
  bool operator==(const BaselineCodes&) const = default;
};

/// The error that the calibration minimized, on the tokens that it saw, relative to the energy of the exact quantity.
struct FitError {
  std::string metric;  ///< "query_weighted" (keys), "attention_weighted", "output_weighted" (and by o_proj's metric) or
                       ///< "unweighted" (values)
  double before = 0.0;  ///< plain codes: the baseline, or in files before 1.3 the same coder without map, center, clip
  double after = 0.0;   ///< this plan
  std::optional<BaselineCodes> baseline = {};  ///< missing in files before 1.3
};

inline constexpr int kGainWidths = 8;  ///< widths that have a gain: 1..8

/// Widths that differ from channel to channel; each run of one width is one group of the coder (packing.md, "Mixed
/// widths").
struct BitAllocation {
  std::string unit = "channel";                   ///< what has one width: "rope_block" or "channel"
  std::string score = {};                         ///< name of the score that decided the widths
  std::vector<std::uint8_t> channel_bits = {};    ///< [H, D], 0..8, descending along x_rot
  std::vector<std::uint16_t> channel_order = {};  ///< [H, D], source of each gathered channel, for people
  std::vector<std::uint8_t> block_bits = {};      ///< [H, blocks] in RoPE-block order, or empty for unit "channel"
  std::vector<float> block_energy = {};           ///< [H, blocks] the scores, or empty
  double objective = 0.0;                         ///< sum over heads of sum_i s_i 4^-b_i of these widths
  double free_objective = 0.0;  ///< the same for the best widths of as many bits without the layout's granule
  /// [H, 8] gain of the segment of width w at w - 1: a row has one scale (packing.md, "One scale a row"). Empty: each
  /// segment has a scale of its own.
  std::vector<float> segment_gain = {};
  double mean_bits() const;
  bool has_row_scale() const { return !segment_gain.empty(); }
  /// Gain of the segment of a width 1..8 of entry h.
  float gain(int h, int width) const { return segment_gain[static_cast<std::size_t>(h * kGainWidths + width - 1)]; }
};

/// K-means residual codes: each row is stored relative to its nearest centroid (packing.md, "Centroids").
struct Centroids {
  int count = 0;
  bool joint = false;                ///< one index for all heads of a token, else one per KV head
  bool after_rotation = false;       ///< clustered after the rotation; stored unrotated in both cases
  std::vector<float> values = {};    ///< [H, C, D]
  std::vector<double> inertia = {};  ///< [H] mean squared residual over mean squared distance from the mean
};

/// The metric transform inside a map, and each head's outlier gain and condition.
struct MetricTransform {
  std::string kind = "balanced";  ///< "diagonal", "balanced" or "klt"; "mixed": each head one of these, or a rotation
  std::vector<double> outlier_gain =
      {};  ///< [H] tr W tr C over its optimum (tr (C^1/2 W C^1/2)^1/2)^2; 1: nothing to gain
  std::vector<double> condition = {};  ///< [H] transform_condition(), at most kMostCondition
};

/// How one layer's keys, or its values, are stored.
struct TensorPlan {
  Rotation rotation = {};
  std::optional<MetricTransform> transform = {};  ///< missing: the rotation is orthogonal
  std::vector<float> center = {};                 ///< [H, D], or empty for none
  std::optional<Centroids> centroids = {};        ///< never together with a center
  std::optional<BitAllocation> allocation = {};   ///< missing: one width for all channels
  Coder coder = ExactCoder{};
  std::vector<double> clip_ratio = {};  ///< [H] for scale rule minmax (1 = no clip), empty otherwise
  std::optional<FitError> error = {};
};

struct LayerPlan {
  int layer = 0;
  LayerGeometry geometry;
  TensorPlan k;
  std::optional<TensorPlan> v;  ///< missing for a layer without values (mla_rope)
  /// Null for Side::v of a layer without values.
  const TensorPlan* side(Side side) const { return side == Side::k ? &k : v ? &*v : nullptr; }
};

/// How many first and last tokens of every sequence stay exact.
struct Windows {
  int sink_tokens = 0;
  int recent_tokens = 0;
  bool operator==(const Windows&) const = default;
};

/// Checks one plan against its layer: extents, ranges, group size, scale rule of the coder, finite numbers.
/// @param side  selects head_dim or v_head_dim; named in the message
/// @throws      Error{bad_input} naming layer, side, expected and found
void validate(const TensorPlan& plan, const LayerGeometry& geometry, int layer, Side side);
void validate(const LayerPlan& plan);

/// Largest |R^T R - I| over all heads of an orthogonal dense rotation, in double; 0 for all others.
double orthogonality_error(const Rotation& rotation, int dim);

/// How much a transform amplifies rounding: the root mean square over channels i of |row i of A| |column i of A^-1|. At
/// least 1. It is 1 for a rotation, with or without channel scales, because scaling a channel does not change the
/// relative rounding of a float.
double transform_condition(const Rotation& rotation, int entry, int dim);
inline constexpr double kMostCondition = 4096.0;

/// Largest |A^-1 A - I| of one entry of [H, D, D], in double; 0 without an inverse. Rounding A and A^-1 to float32
/// leaves less than kInverseTolerance * transform_condition().
double inverse_error(const Rotation& rotation, int entry, int dim);
inline constexpr double kInverseTolerance = 1e-6;

/// Bounds of Rotation::channel_scale, and of BitAllocation::segment_gain.
inline constexpr float kLeastChannelScale = 0x1p-24f, kMostChannelScale = 0x1p24f;

/// RoPE blocks of a head of `dim` channels; if `dim` is odd, the last block has one channel.
inline int num_blocks(int dim) { return (dim + 1) / 2; }

/// Bytes of the centroid index in a row: 0 without centroids.
int index_bytes(const TensorPlan& plan);
/// Byte offsets of the parts of one head's row, before its size is rounded up to the common size.
RowLayout row_layout(const TensorPlan& plan, int kv_head, int dim);
/// Bytes of a row, equal for all heads of the side.
int row_bytes(const TensorPlan& plan, int dim);
CacheLayout cache_layout(const LayerPlan& plan);

/// Average code bits of an element: the mean width of mixed rows, 16 for exact.
double mean_code_bits(const TensorPlan& plan);

/// Average bits per element of one side at a context of `context` tokens: codes, scales, minima, padding, and the
/// 16-bit rows of the exact windows.
double effective_bits(const TensorPlan& plan, int dim, const Windows& windows, std::int64_t context);

}  // namespace kvq
