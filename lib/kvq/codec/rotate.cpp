#include <kvq/codec/codec.h>
#include <kvq/core/error.h>

#include <cmath>

namespace kvq {

namespace {

/// Normalised Walsh-Hadamard transform of neighbouring blocks, in place: Sylvester's order, OSCAR A.1.
void block_hadamard(std::vector<double>& x, std::size_t order) {
  for (std::size_t start = 0; start < x.size(); start += order)
    for (std::size_t half = 1; half < order; half *= 2)
      for (std::size_t i = start; i < start + order; i += 2 * half)
        for (std::size_t j = i; j < i + half; ++j) {
          const double sum = x[j] + x[j + half];
          x[j + half] = x[j] - x[j + half];
          x[j] = sum;
        }
  const double norm = 1.0 / std::sqrt(static_cast<double>(order));
  for (double& value : x) value *= norm;
}

}  // namespace

void rotate_row(const TensorPlan& plan, int kv_head, std::span<const float> x, std::span<float> x_rot) {
  const std::size_t d = x.size();
  const auto h = static_cast<std::size_t>(plan.rotation.head_index(kv_head));
  KVQ_ASSERT(x_rot.size() == d);
  std::vector<double> y(x.begin(), x.end());
  if (!plan.center.empty())
    for (std::size_t j = 0; j < d; ++j) y[j] = x[j] - plan.center[h * d + j];  // float32, as the formula says
  if (plan.rotation.kind == RotationKind::block_hadamard) {
    if (!plan.rotation.signs.empty())
      for (std::size_t j = 0; j < d; ++j) y[j] *= plan.rotation.signs[h * d + j];
    block_hadamard(y, static_cast<std::size_t>(plan.rotation.order));
  } else if (plan.rotation.kind == RotationKind::dense) {
    const float* r = plan.rotation.matrix.data() + h * d * d;
    std::vector<double> out(d, 0.0);
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) out[j] += y[i] * r[i * d + j];
    y.swap(out);
  }
  for (std::size_t j = 0; j < d; ++j) x_rot[j] = static_cast<float>(y[j]);
}

void unrotate_row(const TensorPlan& plan, int kv_head, std::span<const float> x_rot, std::span<float> x) {
  const std::size_t d = x.size();
  const auto h = static_cast<std::size_t>(plan.rotation.head_index(kv_head));
  KVQ_ASSERT(x_rot.size() == d);
  std::vector<double> y(x_rot.begin(), x_rot.end());
  if (plan.rotation.kind == RotationKind::block_hadamard) {
    block_hadamard(y, static_cast<std::size_t>(plan.rotation.order));  // symmetric and orthogonal: its own inverse
    if (!plan.rotation.signs.empty())
      for (std::size_t j = 0; j < d; ++j) y[j] *= plan.rotation.signs[h * d + j];
  } else if (plan.rotation.kind == RotationKind::dense) {
    const float* r = plan.rotation.matrix.data() + h * d * d;
    std::vector<double> out(d, 0.0);
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) out[i] += y[j] * r[i * d + j];
    y.swap(out);
  }
  for (std::size_t j = 0; j < d; ++j)
    x[j] = static_cast<float>(y[j] + (plan.center.empty() ? 0.0 : double{plan.center[h * d + j]}));
}

void reconstruct(const TensorPlan& plan, int kv_head, std::span<float> x, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const double rho = plan.clip_ratio.empty() ? 1.0 : plan.clip_ratio[static_cast<std::size_t>(plan.rotation.head_index(kv_head))];
  std::vector<float> rotated(d);
  for (std::size_t t = 0; t < x.size() / d; ++t) {
    const auto row = x.subspan(t * d, d);
    rotate_row(plan, kv_head, row, rotated);
    quantize_row(plan.coder, rho, rotated);
    unrotate_row(plan, kv_head, rotated, row);
  }
}

}  // namespace kvq
