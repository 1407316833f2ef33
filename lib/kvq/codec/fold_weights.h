#pragma once

#include <kvq/core/dtype.h>
#include <kvq/plan/layer_plan.h>

#include <span>
#include <string>

/// Folds maps into a model's weights, so that serving needs no rotation. With A as in plan/rotation.h, orthogonal or
/// not: the projection that writes rows is multiplied by A, the projection that reads them by A^-1. Weights are
/// row-major [out_features, in_features], as PyTorch stores them, in double; a caller rounds them to the model's type
/// afterwards.
namespace kvq {

/// Weights of one projection.
struct Projection {
  std::span<double> weight;  ///< [out, in], changed in place
  std::span<double> bias;    ///< [out] changed in place, or empty if the model has none
};

/// Relative Frobenius norm of the change when weights are rounded to the model's type: of the folded weights, and
/// (`_before`) of the given weights. The difference is the cost of folding.
struct FoldError {
  double v_proj = 0.0, v_proj_before = 0.0;
  double o_proj = 0.0, o_proj_before = 0.0;
};

/// Folds the map of the values. v_proj then gives (v - center) @ A; the weights of each head in o_proj are multiplied
/// by A^-T, so that o_proj reads attention's output over these values. Exact in real arithmetic if attention weights
/// sum to 1. A cache quantized by `plan` then needs no rotation of values.
/// @param hidden  in_features of v_proj, out_features of o_proj
/// @param v_proj  weight [Hkv Dv, hidden]; with a center, v_proj and o_proj need a bias
/// @param o_proj  weight [hidden, Hq Dv]
/// @param type    f16, bf16 or f32: type in which the weights will be stored
/// @throws        Error{bad_input} for extents that disagree, naming expected and found; Error{unsupported} for
///                centroids, for a layer without values, and for a center without the biases that hold it
FoldError fold_value_rotation(const LayerPlan& plan, int hidden, DType type, const Projection& v_proj,
                              const Projection& o_proj);

/// Folds the map of the keys into q_proj [Hq D, hidden] and k_proj [Hkv D, hidden]: k_proj then gives (k - center) @ A,
/// q_proj gives q @ A^-T. Only for layers without RoPE, because A applies to keys after RoPE and does not commute with
/// RoPE. A layer with QK-norm cannot be folded either; a plan does not say whether a layer has QK-norm, so the caller
/// must check.
/// @throws  Error{unsupported} for a layer with RoPE, with the reason; otherwise as above
void fold_key_rotation(const LayerPlan& plan, int hidden, const Projection& q_proj, const Projection& k_proj);

/// Why the channel_scale of a layer's keys cannot be folded: the plan has none, or the two channels of a rotary pair
/// have different scales, which do not commute with RoPE. Empty if folding is possible.
std::string key_scale_fault(const LayerPlan& plan);

/// Folds the channel_scale of the keys: k_proj then gives k * channel_scale, q_proj gives q / channel_scale. The two
/// channels of a rotary pair must share one scale, because only then scaling commutes with RoPE. Rounding the weights
/// to 16 bits afterwards changes a weight by its last digit. Serving then needs the plan without channel_scale and with
/// the center center * channel_scale.
/// @param q_proj  weight [Hq D, hidden]; each query head uses the scales of its KV head
/// @param k_proj  weight [Hkv D, hidden]
/// @throws        Error{unsupported} with key_scale_fault(); Error{bad_input} as above
void fold_key_scales(const LayerPlan& plan, int hidden, const Projection& q_proj, const Projection& k_proj);

/// The same for a layer with QK-norm: folds the scales into the weights [D] of both norms, which all heads share.
/// @throws  Error{unsupported} also if two KV heads have different scales, naming both
void fold_key_scales(const LayerPlan& plan, std::span<double> q_norm, std::span<double> k_norm);

}  // namespace kvq
