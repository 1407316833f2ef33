#pragma once

#include <kvq/core/geometry.h>
#include <kvq/plan/rotation.h>
#include <kvq/plan/scheme.h>

#include <optional>
#include <string>
#include <vector>

namespace kvq {

/// What the calibration minimised, relative to the energy of the exact quantity.
struct FitError {
  std::string metric;   ///< "query_weighted" (keys), "attention_weighted" or "unweighted" (values)
  double before = 0.0;  ///< the same coder without rotation, centre and clip
  double after = 0.0;   ///< this plan
};

/// How one layer's keys, or its values, are stored.
struct TensorPlan {
  Rotation rotation;
  std::vector<float> center;       ///< [H, D], or empty for none
  Coder coder = ExactCoder{};
  std::vector<double> clip_ratio;  ///< [H] for scale rule minmax (1 = no clip), empty otherwise
  std::optional<FitError> error;
};

struct LayerPlan {
  int layer = 0;
  LayerGeometry geometry;
  TensorPlan k;
  std::optional<TensorPlan> v;  ///< missing for a layer without values (mla_rope)
};

/// Tokens of every sequence that stay exact: the first and the last ones.
struct Windows {
  int sink_tokens = 0;
  int recent_tokens = 0;
  bool operator==(const Windows&) const = default;
};

/// Checks one plan against its layer: extents, ranges, group size, rule and coder fit, finite numbers.
/// @param side  'k' or 'v', for the message
/// @throws      Error{bad_input} naming layer, side, expected and found
void validate(const TensorPlan& plan, const LayerGeometry& geometry, int layer, char side);
void validate(const LayerPlan& plan);

/// Largest |R^T R - I| over all heads of a dense rotation, in double; 0 for the other kinds.
double orthogonality_error(const Rotation& rotation, int dim);

/// Average bits per element of one side at a context of `context` tokens: payload, numbers beside it and the tokens that
/// the windows keep in 16 bit.
double effective_bits(const Coder& coder, int dim, const Windows& windows, std::int64_t context);

}  // namespace kvq
