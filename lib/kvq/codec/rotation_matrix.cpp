#include <kvq/codec/rotation_matrix.h>

#include <bit>
#include <cmath>
#include <cstddef>

namespace kvq {

std::vector<double> rotation_matrix(const Rotation& rotation, int entry, int dim) {
  const auto d = static_cast<std::size_t>(dim), first = static_cast<std::size_t>(entry);
  if (rotation.kind == RotationKind::identity && rotation.channel_scale.empty()) return {};
  if (rotation.kind == RotationKind::dense) {
    const float* r = rotation.matrix.data() + first * d * d;
    return {r, r + d * d};
  }
  const std::size_t order = rotation.kind == RotationKind::identity ? 1 : static_cast<std::size_t>(rotation.order);
  const double size = 1.0 / std::sqrt(static_cast<double>(order));
  std::vector<double> matrix(d * d, 0.0);
  for (std::size_t i = 0; i < d; ++i) {
    const double sign = rotation.signs.empty() ? 1.0 : rotation.signs[first * d + i];
    const double scale = rotation.channel_scale.empty() ? 1.0 : double{rotation.channel_scale[first * d + i]};
    const std::size_t start = i / order * order;
    for (std::size_t j = start; j < start + order; ++j)
      matrix[i * d + j] = (std::popcount((i - start) & (j - start)) % 2 != 0 ? -size : size) * sign * scale;
  }
  return matrix;
}

std::vector<double> inverse_matrix(const Rotation& rotation, int entry, int dim) {
  const auto d = static_cast<std::size_t>(dim), first = static_cast<std::size_t>(entry);
  if (!rotation.inverse.empty()) {
    const float* r = rotation.inverse.data() + first * d * d;
    return {r, r + d * d};
  }
  const std::vector<double> matrix = rotation_matrix(rotation, entry, dim);
  std::vector<double> inverse(matrix.size());
  for (std::size_t i = 0; i < d && !matrix.empty(); ++i) {
    const double scale = rotation.channel_scale.empty() ? 1.0 : double{rotation.channel_scale[first * d + i]};
    for (std::size_t j = 0; j < d; ++j) inverse[j * d + i] = matrix[i * d + j] / (scale * scale);
  }
  return inverse;
}

void block_hadamard(std::span<double> x, std::size_t order) {
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

}  // namespace kvq
