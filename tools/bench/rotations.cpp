#include "bench/rotations.h"

#include "bench/reference.h"

#include <kvq/codec/linear_basis.h>
#include <kvq/codec/rotation_matrix.h>
#include <kvq/plan/kernel_limits.h>
#include <kvq/runtime/checks.h>
#include <kvq/runtime/prepare.h>
#include <kvq/runtime/row_code_data.h>

#include <cmath>

namespace kvq::bench {

namespace {

/// Orthonormal rows, by Gram-Schmidt from normal rows.
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
  if (!matrices.empty()) {
    DeviceRotation dense{
        .per_head = true,
        .matrix = memory.put(matrices),
        .fragments = memory.put(rotation_fragments(matrices, rotations.head_dim)),
    };
    if (!rotations.plans[0].rotation.is_orthogonal())
      dense.sizes = memory.put(column_sizes(rotations.results, rotations.head_dim));
    return dense;
  }
  if (!rotations.factors.empty())
    return {.order = rotations.order, .per_head = true, .factors = memory.put(rotations.factors)};
  if (rotations.order > 0) return {.order = rotations.order, .per_head = true, .signs = memory.put(rotations.signs)};
  return {};
}

/// Orthogonal x diagonal x orthogonal with diagonal factors from 1/4 to 4, and the inverse.
Rotation random_transform(std::size_t dim, std::mt19937& random) {
  const std::vector<float> left = random_orthogonal(dim, random), right = random_orthogonal(dim, random);
  std::uniform_real_distribution<double> uniform(-2.0, 2.0);
  std::vector<double> a(dim * dim), back(dim * dim);
  for (std::size_t k = 0; k < dim; ++k) {
    const double stretch = std::exp2(uniform(random));
    for (std::size_t i = 0; i < dim; ++i)
      for (std::size_t j = 0; j < dim; ++j) {
        const double both = static_cast<double>(left[i * dim + k]) * static_cast<double>(right[k * dim + j]);
        a[i * dim + j] += stretch * both, back[j * dim + i] += both / stretch;
      }
  }
  return {.kind = RotationKind::dense, .matrix = {a.begin(), a.end()}, .inverse = {back.begin(), back.end()}};
}

}  // namespace

HeadRotations random_rotations(CaseRotation kind, int num_kv_heads, int head_dim, std::mt19937& random) {
  const auto dim = static_cast<std::size_t>(head_dim);
  HeadRotations all;
  all.head_dim = head_dim;
  all.plans.resize(static_cast<std::size_t>(num_kv_heads));
  const bool blocks = kind == CaseRotation::hadamard || kind == CaseRotation::scaled;
  if (blocks) all.order = hadamard_order(head_dim);
  for (TensorPlan& plan : all.plans) {
    if (blocks) {
      std::vector<std::int8_t> signs(dim);
      for (std::int8_t& s : signs) s = random() & 1 ? 1 : -1;
      all.signs.insert(all.signs.end(), signs.begin(), signs.end());
      plan.rotation = {.kind = RotationKind::block_hadamard, .order = all.order, .signs = signs};
      if (kind == CaseRotation::hadamard) continue;
      for (std::size_t i = 0; i < dim; ++i)
        plan.rotation.channel_scale.push_back(std::ldexp(1.0f, static_cast<int>(random() % 5) - 2));
      const std::vector<float> factors = read_factors(plan.rotation);
      all.factors.insert(all.factors.end(), factors.begin(), factors.end());
    } else if (kind != CaseRotation::none) {
      plan.rotation = kind == CaseRotation::transform
                          ? random_transform(dim, random)
                          : Rotation{.kind = RotationKind::dense, .matrix = random_orthogonal(dim, random)};
      const std::vector<float>&matrix = plan.rotation.matrix, &inverse = plan.rotation.inverse;
      all.matrices.insert(all.matrices.end(), matrix.begin(), matrix.end());
      const auto back = [&](std::size_t i, std::size_t j) {
        return inverse.empty() ? matrix[j * dim + i] : inverse[i * dim + j];
      };
      for (std::size_t i = 0; i < dim; ++i)
        for (std::size_t j = 0; j < dim; ++j) all.results.push_back(back(i, j)), all.queries.push_back(back(j, i));
    }
  }
  return all;
}

DeviceRotation key_rotation(Memory& memory, const HeadRotations& rotations) {
  return on_device(memory, rotations, rotations.queries);
}
DeviceRotation value_rotation(Memory& memory, const HeadRotations& rotations) {
  return on_device(memory, rotations, rotations.results);
}
DeviceRotation bits_rotation(Memory& memory, const HeadRotations& rotations, const CacheShape& shape, Side side) {
  const TileSide& tiles = side == Side::v ? shape.v : shape.k;
  const bool linear = is_linear_format(tiles);
  const int dim = tiles.head_dim, bits = 32 * tiles.row_words;
  const std::vector<double> basis =
      linear ? linear_basis(bit_plan(shape, side), 0, dim, side, bits) : std::vector<double>();
  std::vector<float> bases, inverses;
  for (const TensorPlan& plan : rotations.plans) {
    bases.insert(bases.end(), basis.begin(), basis.end());
    const std::vector<double> inverse = inverse_matrix(plan.rotation, 0, dim);
    inverses.insert(inverses.end(), inverse.begin(), inverse.end());
  }
  DeviceRotation rotation = side == Side::k ? key_rotation(memory, rotations) : value_rotation(memory, rotations);
  rotation.per_head = true;
  rotation.row_matrices = memory.put(
      row_matrices(rotations.plans.size(), inverses, bases, dim, linear ? tiles.row_words : 0, side == Side::v));
  if (!linear) return rotation;
  const HostTaps taps = linear_taps(bases, dim, bits, side == Side::v);
  rotation.taps = {memory.put(taps.weights), memory.put(taps.sources), taps.count};
  return rotation;
}

RowCode bits_code(Memory& memory, const CacheShape& shape, Side side) {
  const int dim = side == Side::v ? shape.v.head_dim : shape.k.head_dim;
  const RowCodeData data = row_code_data(for_heads(bit_plan(shape, side), shape.num_kv_heads), shape.num_kv_heads, dim);
  RowCode code = data.values;
  if (!data.segments.programs.empty()) {
    code.programs = memory.put(data.segments.programs);
    code.program_taps = {memory.put(data.segments.weights), memory.put(data.segments.sources), 1};
  }
  code.heads = memory.put(data.heads), code.tables = memory.put(data.tables), code.weights = memory.put(data.weights);
  code.levels = memory.put(data.levels);
  return code;
}

RowCode centroid_code(Memory& memory, const HeadRotations& rotations, const TileSide& tiles, Side side) {
  const auto dim = static_cast<std::size_t>(tiles.head_dim);
  std::vector<float> rotated, unrotated;
  for (std::size_t head = 0; head < rotations.plans.size(); ++head) {
    const std::vector<float> of_head = centroids_of(tiles, side, static_cast<int>(head));
    const std::vector<double> inverse = inverse_matrix(rotations.plans[head].rotation, 0, tiles.head_dim);
    rotated.insert(rotated.end(), of_head.begin(), of_head.end());
    for (std::size_t at = 0; at < of_head.size(); at += dim)
      for (std::size_t to = 0; to < dim; ++to) {
        double sum = 0.0;
        for (std::size_t from = 0; from < dim; ++from) sum += double{of_head[at + from]} * inverse[from * dim + to];
        unrotated.push_back(static_cast<float>(sum));
      }
  }
  RowCode code;
  code.num_centroids = kMostTunedCentroids, code.per_head = true;
  code.centroids = memory.put(unrotated), code.rotated_centroids = memory.put(rotated);
  return code;
}

}  // namespace kvq::bench
