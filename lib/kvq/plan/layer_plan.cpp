#include <kvq/plan/layer_plan.h>

#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

struct Checker {
  int layer;
  char side;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error{ErrorKind::bad_input, fmt::format("layer {} {}: {}", layer, side, what)};
  }
  void expect_size(std::size_t found, std::size_t expected, const char* name) const {
    if (found != expected) fail(fmt::format("{}: expected {} values, found {}", name, expected, found));
  }
  template <typename T>
  void expect_finite(const std::vector<T>& values, const char* name) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!std::isfinite(values[i])) fail(fmt::format("{}: value {} is not finite", name, i));
  }

  void check_rotation(const Rotation& rotation, int num_kv_heads, int dim) const {
    const auto heads = static_cast<std::size_t>(rotation.scope == Scope::layer ? 1 : num_kv_heads);
    const auto d = static_cast<std::size_t>(dim);
    expect_size(rotation.matrix.size(), rotation.kind == RotationKind::dense ? heads * d * d : 0, "rotation");
    if (!rotation.signs.empty()) expect_size(rotation.signs.size(), heads * d, "hadamard_signs");
    for (const auto sign : rotation.signs)
      if (sign != 1 && sign != -1) fail(fmt::format("hadamard_signs: expected +1 or -1, found {}", int{sign}));
    if (rotation.kind == RotationKind::block_hadamard &&
        (rotation.order < 1 || dim % rotation.order != 0 || (rotation.order & (rotation.order - 1)) != 0))
      fail(fmt::format("rotation order: expected a power of two that divides head_dim {}, found {}", dim,
                       rotation.order));
    if (!rotation.sign_choice.empty()) expect_size(rotation.sign_choice.size(), heads, "sign_choice");
    if (!rotation.eigenbasis.empty()) expect_size(rotation.eigenbasis.size(), heads * d * d, "eigenbasis");
    if (!rotation.spectrum.empty()) expect_size(rotation.spectrum.size(), heads * d, "spectrum");
    if (rotation.eigenbasis.empty() != rotation.spectrum.empty()) fail("eigenbasis and spectrum: expected both or none");
    expect_finite(rotation.matrix, "rotation");
    expect_finite(rotation.eigenbasis, "eigenbasis");
    expect_finite(rotation.spectrum, "spectrum");
  }

  void check_clip(const TensorPlan& plan, std::size_t heads, bool minmax) const {
    expect_size(plan.clip_ratio.size(), minmax ? heads : 0, "clip_ratio");
    for (const double rho : plan.clip_ratio)
      if (!(rho > 0.0 && rho <= 1.0)) fail(fmt::format("clip_ratio: expected a number in (0, 1], found {}", rho));
  }

  void check_uniform(const UniformCoder& coder, int dim) const {
    if (coder.bits < 1 || coder.bits > 8) fail(fmt::format("bits: expected 1 to 8, found {}", coder.bits));
    if (coder.group_size < 1 || dim % coder.group_size != 0)
      fail(fmt::format("group_size: expected a divisor of head_dim {}, found {}", dim, coder.group_size));
    const bool affine = coder.levels == UniformLevels::affine;
    if (affine != (coder.rule == ScaleRule::minmax))
      fail(fmt::format("scale_rule {} does not go with coder {}", to_string(coder.rule), to_string(coder.levels)));
  }
};

}  // namespace

void validate(const TensorPlan& plan, const LayerGeometry& geometry, int layer, char side) {
  const Checker checker{layer, side};
  const int dim = side == 'k' ? geometry.head_dim : geometry.v_head_dim;
  const auto heads = static_cast<std::size_t>(plan.rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads);
  checker.check_rotation(plan.rotation, geometry.num_kv_heads, dim);
  if (!plan.center.empty()) checker.expect_size(plan.center.size(), heads * static_cast<std::size_t>(dim), "center");
  checker.expect_finite(plan.center, "center");
  const auto* uniform = std::get_if<UniformCoder>(&plan.coder);
  if (uniform) checker.check_uniform(*uniform, dim);
  checker.check_clip(plan, heads, uniform && uniform->rule == ScaleRule::minmax);
}

void validate(const LayerPlan& plan) {
  validate(plan.k, plan.geometry, plan.layer, 'k');
  if (plan.v) validate(*plan.v, plan.geometry, plan.layer, 'v');
}

double orthogonality_error(const Rotation& rotation, int dim) {
  if (rotation.kind != RotationKind::dense) return 0.0;
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t heads = rotation.matrix.size() / (d * d);
  std::vector<double> row(d);
  double worst = 0.0;
  for (std::size_t h = 0; h < heads; ++h) {
    const float* r = rotation.matrix.data() + h * d * d;
    for (std::size_t i = 0; i < d; ++i) {  // row i of R^T R, accumulated over rows of R so that memory is walked in order
      std::fill(row.begin(), row.end(), 0.0);
      for (std::size_t c = 0; c < d; ++c) {
        const double left = r[c * d + i];
        for (std::size_t j = 0; j < d; ++j) row[j] += left * r[c * d + j];
      }
      row[i] -= 1.0;
      for (const double value : row) worst = std::max(worst, std::abs(value));
    }
  }
  return worst;
}

double effective_bits(const Coder& coder, int dim, const Windows& windows, std::int64_t context) {
  if (context <= 0) return 0.0;
  const std::int64_t exact = std::min<std::int64_t>(context, windows.sink_tokens + windows.recent_tokens);
  const double coded_bits = 8.0 * static_cast<double>(row_bytes(coder, dim)) / dim;
  return (static_cast<double>(exact) * 16.0 + static_cast<double>(context - exact) * coded_bits) /
         static_cast<double>(context);
}

}  // namespace kvq
