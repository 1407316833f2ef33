#include <kvq/core/error.h>
#include <kvq/methods/recipes.h>
#include <kvq/methods/rotated_plan.h>
#include <kvq/solve/spectral.h>
#include <kvq/solve/structured.h>

#include <algorithm>

// SAW-INT4 (arXiv 2604.19157): token-wise affine codes with one scale and zero per token and head (A.1), block-diagonal
// Hadamard rotation (A.4) of keys only by default, as its repository serves it; no exact windows. Hessian rotation:
// A.3. K-means residual codes (A.2) are an axis of every method, see centroids.cpp.

namespace kvq {

namespace {

enum class Hessian { none, paper, consistent };

const char* to_string(Hessian hessian) {
  switch (hessian) {
    case Hessian::none: return "none";
    case Hessian::paper: return "paper";
    case Hessian::consistent: return "consistent";
  }
  return "?";
}

constexpr OwnOption<Hessian> kHessian{"hessian", Hessian::none};

bool has_hessian(const Options& options) { return kHessian.of(options) != Hessian::none; }

/// `asked` if not 0, else the largest power of two up to 128 that divides head_dim.
int resolve_order(int asked, int dim, int layer, Side side) {
  if (asked == 0) return std::min(128, hadamard_order(dim));
  if ((asked & (asked - 1)) == 0 && asked >= 16 && asked <= 256 && dim % asked == 0) return asked;
  std::string orders;
  for (int order = 16; order <= 256; order *= 2)
    if (dim % order == 0) orders += fmt::format("{}{}", orders.empty() ? "" : ", ", order);
  throw Error{ErrorKind::usage,
              fmt::format("layer {} {}: --hadamard-order {} does not fit head_dim {}", layer, name(side), asked, dim),
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
    const auto signs = random_signs(request.dim(), request.options.seed, request.stats.layer, stream(h, request.side));
    rotation.signs.insert(rotation.signs.end(), signs.begin(), signs.end());
  }
  return rotation;
}

/// The moment averaged over all KV heads: the paper pools the heads of a layer.
std::vector<double> pooled(const std::vector<std::vector<double>>& moments) {
  std::vector<double> mean = moments.front();
  for (std::size_t h = 1; h < moments.size(); ++h)
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += moments[h][i];
  for (double& value : mean) value /= static_cast<double>(moments.size());
  return mean;
}

/// A.3: x -> (x H_b) R with R the eigenbasis of the damped moment M + 0.01 mean(diag M) I, Eq. 7-11. `paper` takes M of
/// unrotated rows pooled over the heads, although R multiplies rotated rows; `consistent` takes H_b^T M H_b of each
/// head, so that R diagonalizes the moment of the rows that R multiplies. Keys: queries; values: the values themselves
/// ("the same pipeline").
Rotation hessian_rotation(const RotationRequest& request, int order) {
  constexpr double kDamping = 0.01;
  const int dim = request.dim();
  const auto d = static_cast<std::size_t>(dim);
  const bool paper = kHessian.of(request.options) == Hessian::paper;
  std::vector<std::vector<double>> moments =
      scoped_moment(request, request.side == Side::k ? Moment::query : Moment::value, false);
  if (paper) moments.assign(moments.size(), pooled(moments));
  const Rotation blocks = hadamard_rotation(request, order);
  Rotation rotation{
      .kind = RotationKind::dense,
      .order = order,
      .signs = blocks.signs,
      .recipe = blocks.recipe + "*U",
      .target = request.side == Side::k ? "query" : "value",
  };
  for (int h = 0; h < request.heads(); ++h) {
    std::vector<double>& damped = moments[static_cast<std::size_t>(h)];
    if (!paper) damped = turned(damped, rotation_matrix(blocks, h, dim), dim);
    double trace = 0.0;
    for (std::size_t i = 0; i < d; ++i) trace += damped[i * d + i];
    for (std::size_t i = 0; i < d; ++i) damped[i * d + i] += kDamping * trace / dim;
  }
  const std::vector<EigenPairs> bases = eigenbases(moments, dim, request.backend);
  for (int h = 0; h < request.heads(); ++h) {
    const EigenPairs& pairs = bases[static_cast<std::size_t>(h)];
    const std::vector<double> both = product(rotation_matrix(blocks, h, dim), pairs.vectors, dim);
    rotation.matrix.insert(rotation.matrix.end(), both.begin(), both.end());
    rotation.eigenbasis.insert(rotation.eigenbasis.end(), pairs.vectors.begin(), pairs.vectors.end());
    rotation.spectrum.insert(rotation.spectrum.end(), pairs.values.begin(), pairs.values.end());
  }
  return rotation;
}

Rotation saw_rotation(const RotationRequest& request) {
  if (!request.options.side(request.side).hadamard) return {};
  if (has_hessian(request.options))
    return hessian_rotation(
        request, resolve_order(request.options.hadamard_order, request.dim(), request.stats.layer, request.side));
  return hadamard_rotation(
      request, resolve_order(request.options.hadamard_order, request.dim(), request.stats.layer, request.side));
}

void saw_defaults(Options& options) {
  options.k.bits = options.v.bits = 4;
  options.v.hadamard = false;
}

RotationTensors saw_tensors(const Options& options, Side side, int) {
  const bool rotated = options.side(side).hadamard, hessian = rotated && has_hessian(options);
  return {.matrix = hessian, .basis = hessian, .signs = rotated && options.random_signs};
}

Decision saw_decide(const StatsSource& source, const Options& options, const MethodContext& context) {
  return decide_by_rotation(source, options, context, saw_rotation, 0);
}

/// QuaRot: the full Hadamard on both sides, in the largest blocks head_dim allows.
Rotation quarot_rotation(const RotationRequest& request) {
  return hadamard_rotation(request, hadamard_order(request.dim()));
}

Decision quarot_decide(const StatsSource& source, const Options& options, const MethodContext& context) {
  return decide_by_rotation(source, options, context, quarot_rotation, 0);
}

OptionSpec random_signs_option() {
  return toggle_option(
      {"--random-signs", option_group::kRotations, "saw-int4, quarot: random signs before the Hadamard"},
      &Options::random_signs, {.key = "random_signs", .every_method = true});
}

std::vector<OptionSpec> saw_options() {
  return {
      integer_option({"--hadamard-order", option_group::kRotations,
                      "saw-int4: block size 16 to 256 [largest up to 128 that divides head_dim]"},
                     &Options::hadamard_order, {}, {.key = "hadamard_order", .every_method = true}),
      named_sides({"--hadamard", option_group::kRotations, "saw-int4: rotate none, k, v or kv [k]"},
                  &SideOptions::hadamard, "hadamard", true),
      random_signs_option(),
      choice_option<Hessian>({"--hessian", option_group::kRotations,
                              "saw-int4: none, paper (A.3 as written) or consistent (rotated moment) [none]"},
                             kHessian, {Hessian::none, Hessian::paper, Hessian::consistent},
                             {.key = kHessian.key, .when = has_hessian}),
  };
}

void saw_settle(const Method&, Options& options, const GivenOptions&) {
  if (has_hessian(options) && !options.k.hadamard && !options.v.hadamard)
    throw Error{ErrorKind::usage, "--hessian rotates the sides that --hadamard names, and it names none"};
}

}  // namespace

Method saw_int4_method() {
  return {
      .name = "saw-int4",
      .summary = "token-wise INT4 with a block-diagonal Hadamard rotation of the keys",
      .options = saw_options(),
      .set_defaults = saw_defaults,
      .settle = saw_settle,
      .needs = common_needs,
      .tensors = saw_tensors,
      .decide = saw_decide,
  };
}

Method quarot_method() {
  return {
      .name = "quarot",
      .summary = "baseline: full Hadamard rotation of keys and values",
      .options = {random_signs_option()},
      .set_defaults = [](Options&) {},
      .needs = common_needs,
      .tensors = [](const Options& options, Side, int) { return RotationTensors{.signs = options.random_signs}; },
      .decide = quarot_decide,
  };
}

}  // namespace kvq
