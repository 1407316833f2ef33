#include <kvq/codec/fold_weights.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/core/error.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvq {

namespace {

using Matrix = std::vector<double>;  ///< [D, D] row-major

Matrix transposed(const Matrix& matrix, std::size_t dim) {
  Matrix result(matrix.size());
  for (std::size_t i = 0; i < dim; ++i)
    for (std::size_t j = 0; j < dim; ++j) result[j * dim + i] = matrix[i * dim + j];
  return result;
}

/// `rows` is A of one KV head. `duals` is A^-T, by which queries and the columns of o_proj are multiplied. Both are
/// empty for the identity.
struct Maps {
  Matrix rows, duals;
};
Maps maps_of(const Rotation& rotation, std::size_t kv_head, std::size_t dim) {
  const int entry = rotation.head_index(static_cast<int>(kv_head));
  Matrix rows = rotation_matrix(rotation, entry, static_cast<int>(dim));
  if (rotation.is_orthogonal()) return {rows, rows};
  return {std::move(rows), transposed(inverse_matrix(rotation, entry, static_cast<int>(dim)), dim)};
}

void expect(std::size_t found, std::size_t expected, int layer, const char* what) {
  if (found != expected)
    throw Error(ErrorKind::bad_input,
                fmt::format("fold: layer {} {}: expected {} numbers, found {}", layer, what, expected, found));
}

void refuse(int layer, const std::string& why) {
  throw Error(ErrorKind::unsupported, fmt::format("fold: layer {}: {}", layer, why));
}

/// x rounded to the type's number of significand bits, without regard to the type's range.
double rounded(double x, DType type) {
  const int digits = type == DType::bf16 ? 8 : type == DType::f16 ? 11 : 24;
  if (x == 0.0 || !std::isfinite(x)) return x;
  int exponent = 0;
  const double part = std::frexp(x, &exponent);  // 0.5 .. 1
  return std::ldexp(std::nearbyint(std::ldexp(part, digits)), exponent - digits);
}

double rounding_error(std::span<const double> weights, DType type) {
  double change = 0.0, size = 0.0;
  for (const double x : weights) {
    const double difference = rounded(x, type) - x;
    change += difference * difference;
    size += x * x;
  }
  return size > 0.0 ? std::sqrt(change / size) : 0.0;
}

/// Multiplies rows [first, first + D) of a projection by A^T from the left; the bias b becomes (b - center) A.
void rotate_outputs(const Projection& projection, std::size_t first, std::size_t dim, std::size_t inputs,
                    const Matrix& a, std::span<const float> center) {
  std::vector<double> column(dim);
  const auto transform = [&](double* at, std::size_t stride) {
    if (a.empty()) return;
    for (std::size_t i = 0; i < dim; ++i) column[i] = at[i * stride];
    for (std::size_t j = 0; j < dim; ++j) {
      double sum = 0.0;
      for (std::size_t i = 0; i < dim; ++i) sum += column[i] * a[i * dim + j];
      at[j * stride] = sum;
    }
  };
  for (std::size_t c = 0; c < inputs; ++c) transform(projection.weight.data() + first * inputs + c, inputs);
  if (projection.bias.empty()) return;
  for (std::size_t i = 0; i < center.size(); ++i) projection.bias[first + i] -= static_cast<double>(center[i]);
  transform(projection.bias.data() + first, 1);
}

std::span<const float> center_of(const TensorPlan& plan, int kv_head, std::size_t dim) {
  if (plan.center.empty()) return {};
  return std::span(plan.center).subspan(static_cast<std::size_t>(plan.rotation.head_index(kv_head)) * dim, dim);
}

}  // namespace

FoldError fold_value_rotation(const LayerPlan& plan, int hidden, DType type, const Projection& v_proj,
                              const Projection& o_proj) {
  const LayerGeometry& g = plan.geometry;
  if (!plan.v) refuse(plan.layer, "has no values");
  if (plan.v->centroids)
    refuse(plan.layer, "v: centroids cannot be folded: which one is subtracted depends on the token");
  if (type != DType::f16 && type != DType::bf16 && type != DType::f32)
    refuse(plan.layer, "weights of other types than f16, bf16 and f32");
  const auto dim = static_cast<std::size_t>(g.v_head_dim), in = static_cast<std::size_t>(hidden);
  const auto kv_heads = static_cast<std::size_t>(g.num_kv_heads), q_heads = static_cast<std::size_t>(g.num_q_heads);
  expect(v_proj.weight.size(), kv_heads * dim * in, plan.layer, "v_proj");
  expect(o_proj.weight.size(), in * q_heads * dim, plan.layer, "o_proj");
  if (!v_proj.bias.empty()) expect(v_proj.bias.size(), kv_heads * dim, plan.layer, "v_proj bias");
  if (!o_proj.bias.empty()) expect(o_proj.bias.size(), in, plan.layer, "o_proj bias");
  if (!plan.v->center.empty() && (v_proj.bias.empty() || o_proj.bias.empty()))
    refuse(plan.layer, "v: a center needs biases of v_proj and o_proj to hold it; give them, of zeros if need be");

  FoldError error;
  error.v_proj_before = rounding_error(v_proj.weight, type);
  error.o_proj_before = rounding_error(o_proj.weight, type);
  const std::size_t group = q_heads / kv_heads;
  std::vector<double> row(dim);
  for (std::size_t h = 0; h < kv_heads; ++h) {
    const Maps maps = maps_of(plan.v->rotation, h, dim);
    const std::span<const float> center = center_of(*plan.v, static_cast<int>(h), dim);
    rotate_outputs(v_proj, h * dim, dim, in, maps.rows, center);
    for (std::size_t q = h * group; q < (h + 1) * group; ++q)
      for (std::size_t o = 0; o < in; ++o) {
        double* at = o_proj.weight.data() + (o * q_heads + q) * dim;
        for (std::size_t i = 0; i < center.size(); ++i) o_proj.bias[o] += at[i] * static_cast<double>(center[i]);
        if (maps.duals.empty()) continue;
        for (std::size_t j = 0; j < dim; ++j) {
          row[j] = 0.0;
          for (std::size_t i = 0; i < dim; ++i) row[j] += at[i] * maps.duals[i * dim + j];
        }
        for (std::size_t j = 0; j < dim; ++j) at[j] = row[j];
      }
  }
  error.v_proj = rounding_error(v_proj.weight, type);
  error.o_proj = rounding_error(o_proj.weight, type);
  return error;
}

void fold_key_rotation(const LayerPlan& plan, int hidden, const Projection& q_proj, const Projection& k_proj) {
  const LayerGeometry& g = plan.geometry;
  if (g.rope.layout != RopeLayout::none)
    refuse(plan.layer,
           "k: keys are rotated after RoPE, and A does not commute with the rotation of a position, so that "
           "q_proj and k_proj cannot hold it; rotate queries and keys while serving");
  if (plan.k.centroids)
    refuse(plan.layer, "k: centroids cannot be folded: which one is subtracted depends on the token");
  const auto dim = static_cast<std::size_t>(g.head_dim), in = static_cast<std::size_t>(hidden);
  const auto kv_heads = static_cast<std::size_t>(g.num_kv_heads), q_heads = static_cast<std::size_t>(g.num_q_heads);
  expect(q_proj.weight.size(), q_heads * dim * in, plan.layer, "q_proj");
  expect(k_proj.weight.size(), kv_heads * dim * in, plan.layer, "k_proj");
  if (!q_proj.bias.empty()) expect(q_proj.bias.size(), q_heads * dim, plan.layer, "q_proj bias");
  if (!k_proj.bias.empty()) expect(k_proj.bias.size(), kv_heads * dim, plan.layer, "k_proj bias");
  if (!plan.k.center.empty() && k_proj.bias.empty())
    refuse(plan.layer, "k: a center needs a bias of k_proj to hold it; give one, of zeros if need be");
  const std::size_t group = q_heads / kv_heads;
  for (std::size_t h = 0; h < kv_heads; ++h) {
    const Maps maps = maps_of(plan.k.rotation, h, dim);
    rotate_outputs(k_proj, h * dim, dim, in, maps.rows, center_of(plan.k, static_cast<int>(h), dim));
    for (std::size_t q = h * group; q < (h + 1) * group; ++q) rotate_outputs(q_proj, q * dim, dim, in, maps.duals, {});
  }
}

namespace {

/// Multiplies each of the rows [first, first + D) of a projection, and of its bias, by its own factor.
void scale_outputs(const Projection& projection, std::size_t first, std::size_t inputs,
                   std::span<const double> factors) {
  for (std::size_t i = 0; i < factors.size(); ++i) {
    for (double& x : projection.weight.subspan((first + i) * inputs, inputs)) x *= factors[i];
    if (!projection.bias.empty()) projection.bias[first + i] *= factors[i];
  }
}

std::vector<double> scales_of(const Rotation& rotation, std::size_t kv_head, std::size_t dim, bool inverse) {
  const auto first = static_cast<std::size_t>(rotation.head_index(static_cast<int>(kv_head))) * dim;
  std::vector<double> scales;
  for (std::size_t i = 0; i < dim; ++i) {
    const double scale = static_cast<double>(rotation.channel_scale[first + i]);
    scales.push_back(inverse ? 1.0 / scale : scale);
  }
  return scales;
}

void refuse_key_scales(const LayerPlan& plan) {
  if (const std::string fault = key_scale_fault(plan); !fault.empty()) refuse(plan.layer, fault);
}

}  // namespace

std::string key_scale_fault(const LayerPlan& plan) {
  const LayerGeometry& g = plan.geometry;
  const std::vector<float>& scales = plan.k.rotation.channel_scale;
  if (scales.empty()) return "k: no channel_scale that could be folded";
  const auto dim = static_cast<std::size_t>(g.head_dim);
  const std::vector<RopeBlock> blocks = rope_blocks(g);
  const std::size_t pairs = g.rope.layout == RopeLayout::none ? 0 : static_cast<std::size_t>(g.rope.dim) / 2;
  for (std::size_t first = 0; first < scales.size(); first += dim)
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      const auto [a, b] = blocks[pair];
      const float one = scales[first + static_cast<std::size_t>(a)],
                  other = scales[first + static_cast<std::size_t>(b)];
      if (one != other)
        return fmt::format(
            "k: channel_scale: expected one for the two channels of a rotary pair, found {} of channel {} "
            "and {} of channel {} of head {}: RoPE mixes them, so that weights cannot hold the scales",
            one, a, other, b, first / dim);
    }
  return "";
}

void fold_key_scales(const LayerPlan& plan, int hidden, const Projection& q_proj, const Projection& k_proj) {
  const LayerGeometry& g = plan.geometry;
  refuse_key_scales(plan);
  const auto dim = static_cast<std::size_t>(g.head_dim), in = static_cast<std::size_t>(hidden);
  const auto kv_heads = static_cast<std::size_t>(g.num_kv_heads), q_heads = static_cast<std::size_t>(g.num_q_heads);
  expect(q_proj.weight.size(), q_heads * dim * in, plan.layer, "q_proj");
  expect(k_proj.weight.size(), kv_heads * dim * in, plan.layer, "k_proj");
  if (!q_proj.bias.empty()) expect(q_proj.bias.size(), q_heads * dim, plan.layer, "q_proj bias");
  if (!k_proj.bias.empty()) expect(k_proj.bias.size(), kv_heads * dim, plan.layer, "k_proj bias");
  const std::size_t group = q_heads / kv_heads;
  for (std::size_t h = 0; h < kv_heads; ++h) {
    scale_outputs(k_proj, h * dim, in, scales_of(plan.k.rotation, h, dim, false));
    for (std::size_t q = h * group; q < (h + 1) * group; ++q)
      scale_outputs(q_proj, q * dim, in, scales_of(plan.k.rotation, h, dim, true));
  }
}

void fold_key_scales(const LayerPlan& plan, std::span<double> q_norm, std::span<double> k_norm) {
  refuse_key_scales(plan);
  const auto dim = static_cast<std::size_t>(plan.geometry.head_dim);
  expect(q_norm.size(), dim, plan.layer, "q_norm");
  expect(k_norm.size(), dim, plan.layer, "k_norm");
  const std::vector<double> scales = scales_of(plan.k.rotation, 0, dim, false);
  for (std::size_t h = 1; h < static_cast<std::size_t>(plan.geometry.num_kv_heads); ++h) {
    const std::vector<double> others = scales_of(plan.k.rotation, h, dim, false);
    for (std::size_t i = 0; i < dim; ++i)
      if (others[i] != scales[i])
        refuse(plan.layer,
               fmt::format("k: channel_scale: a norm's weights are those of all heads, and the scales of KV "
                           "heads 0 and {} differ: {} and {} of channel {}",
                           h, scales[i], others[i], i));
  }
  scale_outputs({k_norm, {}}, 0, 1, scales);
  scale_outputs({q_norm, {}}, 0, 1, scales_of(plan.k.rotation, 0, dim, true));
}

}  // namespace kvq
