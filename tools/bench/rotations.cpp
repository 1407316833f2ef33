#include "rotations.h"

#include <kvq/runtime/prepare.h>

#include <cmath>

namespace kvq::bench {

namespace {

/// Orthonormal rows: Gram-Schmidt on normal ones.
std::vector<float> random_orthogonal(std::size_t dim, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<double> rows(dim * dim);
  for (std::size_t i = 0; i < dim; ++i) {
    double* row = &rows[i * dim];
    for (std::size_t c = 0; c < dim; ++c) row[c] = normal(random);
    for (std::size_t k = 0; k < i; ++k) {
      double dot = 0.0;
      for (std::size_t c = 0; c < dim; ++c) dot += row[c] * rows[k * dim + c];
      for (std::size_t c = 0; c < dim; ++c) row[c] -= dot * rows[k * dim + c];
    }
    double squares = 0.0;
    for (std::size_t c = 0; c < dim; ++c) squares += row[c] * row[c];
    for (std::size_t c = 0; c < dim; ++c) row[c] /= std::sqrt(squares);
  }
  return {rows.begin(), rows.end()};
}

DeviceRotation on_device(Memory& memory, const HeadRotations& rotations, const std::vector<float>& matrices) {
  if (!matrices.empty())
    return {0, true, nullptr, memory.put(matrices), memory.put(rotation_fragments(matrices, rotations.head_dim))};
  if (rotations.order > 0) return {rotations.order, true, memory.put(rotations.signs)};
  return {};
}

}  // namespace

HeadRotations random_rotations(CaseRotation kind, int num_kv_heads, int head_dim, std::mt19937& random) {
  const auto dim = static_cast<std::size_t>(head_dim);
  HeadRotations all;
  all.head_dim = head_dim;
  all.plans.resize(static_cast<std::size_t>(num_kv_heads));
  if (kind == CaseRotation::hadamard) all.order = hadamard_order(head_dim);
  for (TensorPlan& plan : all.plans) {
    if (kind == CaseRotation::hadamard) {
      std::vector<std::int8_t> signs(dim);
      for (std::int8_t& s : signs) s = random() & 1 ? 1 : -1;
      all.signs.insert(all.signs.end(), signs.begin(), signs.end());
      plan.rotation = {.kind = RotationKind::block_hadamard, .order = all.order, .signs = signs};
    } else if (kind == CaseRotation::dense) {
      std::vector<float> matrix = random_orthogonal(dim, random);
      all.matrices.insert(all.matrices.end(), matrix.begin(), matrix.end());
      for (std::size_t i = 0; i < dim * dim; ++i) all.transposed.push_back(matrix[i % dim * dim + i / dim]);
      plan.rotation = {.kind = RotationKind::dense, .matrix = std::move(matrix)};
    }
  }
  return all;
}

DeviceRotation key_rotation(Memory& memory, const HeadRotations& rotations) {
  return on_device(memory, rotations, rotations.matrices);
}
DeviceRotation value_rotation(Memory& memory, const HeadRotations& rotations) {
  return on_device(memory, rotations, rotations.transposed);
}

}  // namespace kvq::bench
