#pragma once

#include <kvq/core/dtype.h>
#include <kvq/plan/layer_plan.h>

#include <span>
#include <string>

/// Absorbing rotations in a model's weights, so that nothing has to be rotated while serving. With A as in
/// plan/rotation.h, orthogonal or not: what is written gets A, what reads it A^-1. Weights are row-major [out_features,
/// in_features], as PyTorch stores them, in double; a caller rounds them to the model's type afterwards.
namespace kvq {

/// What one projection looks like.
struct Projection {
  std::span<double> weight;  ///< [out, in], changed in place
  std::span<double> bias;    ///< [out] changed in place, or empty if the model has none
};

/// Relative Frobenius norm of what rounding the folded weights to the model's type changes, and of what rounding the
/// given ones would: the price of folding is the difference.
struct FoldError {
  double v_proj = 0.0, v_proj_before = 0.0;
  double o_proj = 0.0, o_proj_before = 0.0;
};

/// Folds the rotation of the values: v_proj then gives (v - center) @ A, and o_proj takes attention's output of such
/// values: its weights of a head are multiplied by A^-T. Exact in real arithmetic, for attention weights that sum to 1;
/// a cache coded by `plan` then needs no rotation of values.
/// @param hidden  in_features of v_proj, out_features of o_proj
/// @param v_proj  weight [Hkv Dv, hidden]; with a centre it needs a bias, and so does o_proj
/// @param o_proj  weight [hidden, Hq Dv]
/// @param type    f16, bf16 or f32: what the weights will be stored in
/// @throws        Error{bad_input} for extents that disagree, naming expected and found; Error{unsupported} for
/// centroids,
///                for a layer without values and for a centre without the biases that would hold it
FoldError fold_value_rotation(const LayerPlan& plan, int hidden, DType type, const Projection& v_proj,
                              const Projection& o_proj);

/// Folds the rotation of the keys into q_proj [Hq D, hidden] and k_proj [Hkv D, hidden]: k_proj then gives (k - center)
/// @ A, q_proj q @ A^-T. Only a layer without RoPE allows it: keys are rotated after the positions, and A does not
/// commute with the rotation of a position. Norms between projection and attention (QK-norm) forbid it too; a plan does
/// not know of them, so the caller must.
/// @throws  Error{unsupported} for a layer with RoPE, with the reason; otherwise as above
void fold_key_rotation(const LayerPlan& plan, int hidden, const Projection& q_proj, const Projection& k_proj);

/// Why the channel_scale of a layer's keys cannot be folded: there is none, or the two channels of a rotary pair
/// differ, so that scaling does not commute with RoPE. Empty if it can.
std::string key_scale_fault(const LayerPlan& plan);

/// Folds the channel_scale of the keys, which commutes with RoPE where rotary pairs share one: k_proj then gives k *
/// channel_scale, q_proj q / channel_scale. Rounding the weights to 16 bits afterwards changes a weight by its last
/// digit. What is left to serve is the plan without its channel_scale, whose centre is center * channel_scale.
/// @param q_proj  weight [Hq D, hidden], of which a query head takes the scales of its KV head
/// @param k_proj  weight [Hkv D, hidden]
/// @throws        Error{unsupported} with key_scale_fault(); Error{bad_input} as above
void fold_key_scales(const LayerPlan& plan, int hidden, const Projection& q_proj, const Projection& k_proj);

/// The same where norms of each head lie between projections and RoPE (QK-norm): into what they multiply channels by,
/// [D] for all heads. @throws  Error{unsupported} too if KV heads differ in their scales, naming two that do
void fold_key_scales(const LayerPlan& plan, std::span<double> q_norm, std::span<double> k_norm);

}  // namespace kvq
