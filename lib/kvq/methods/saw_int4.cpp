#include <kvq/core/error.h>
#include <kvq/methods/recipes.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/solve/structured.h>

#include <algorithm>

// SAW-INT4 (arXiv 2604.19157): token-wise affine codes with one scale and zero per token and head (A.1), block-diagonal
// Hadamard rotation (A.4) of keys only by default, as its repository serves it; no exact windows.

namespace kvq {

namespace {

/// The order asked for, or the largest power of two up to 128 that divides head_dim.
int resolve_order(int asked, int dim, int layer, char side) {
  if (asked == 0) return std::min(128, hadamard_order(dim));
  if ((asked & (asked - 1)) == 0 && asked >= 16 && asked <= 256 && dim % asked == 0) return asked;
  std::string orders;
  for (int order = 16; order <= 256; order *= 2)
    if (dim % order == 0) orders += fmt::format("{}{}", orders.empty() ? "" : ", ", order);
  throw Error{ErrorKind::usage, fmt::format("layer {} {}: --hadamard-order {} does not fit head_dim {}", layer, side, asked, dim),
              orders.empty() ? "no order from 16 to 256 divides it" : "choose one of " + orders};
}

Rotation hadamard_rotation(const RotationRequest& request, int order) {
  Rotation rotation;
  rotation.kind = RotationKind::block_hadamard;
  rotation.order = order;
  rotation.recipe = "H";
  if (!request.options.random_signs) return rotation;
  rotation.recipe = "S*H";
  for (int h = 0; h < request.heads(); ++h) {
    const auto signs = random_signs(request.dim(), request.options.seed, request.stats.layer, 2 * h + (request.side == 'v' ? 1 : 0));
    rotation.signs.insert(rotation.signs.end(), signs.begin(), signs.end());
  }
  return rotation;
}

Rotation saw_rotation(const RotationRequest& request) {
  if (!request.options.side(request.side).hadamard) return {};
  return hadamard_rotation(request, resolve_order(request.options.hadamard_order, request.dim(), request.stats.layer, request.side));
}

void saw_defaults(Options& options) {
  options.k.bits = options.v.bits = 4;
  options.v.hadamard = false;
}

std::vector<LayerPlan> saw_decide(const StatsSource& source, const Options& options, const LayerDone& done) {
  return decide_by_rotation(source, options, done, saw_rotation, 0);
}

/// QuaRot: the full Hadamard on both sides, in the largest blocks head_dim allows.
Rotation quarot_rotation(const RotationRequest& request) { return hadamard_rotation(request, hadamard_order(request.dim())); }

std::vector<LayerPlan> quarot_decide(const StatsSource& source, const Options& options, const LayerDone& done) {
  return decide_by_rotation(source, options, done, quarot_rotation, 0);
}

}  // namespace

Method saw_int4_method() {
  return {"saw-int4", "token-wise INT4 with a block-diagonal Hadamard rotation of the keys", saw_defaults, common_needs, saw_decide};
}

Method quarot_method() {
  return {"quarot", "baseline: full Hadamard rotation of keys and values", [](Options&) {}, common_needs, quarot_decide};
}

}  // namespace kvq
