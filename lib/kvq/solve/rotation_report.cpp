#include <kvq/compute/eigh.h>
#include <kvq/plan/rotation.h>
#include <kvq/solve/rotation_report.h>
#include <kvq/solve/spectral.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

double mean_group_range(const RotatedData& data, int group_size) {
  const auto g = static_cast<std::size_t>(group_size);
  double total = 0.0;
  for (std::size_t start = 0; start < data.rows.size(); start += g) {
    const auto begin = data.rows.begin() + static_cast<std::ptrdiff_t>(start);
    const auto [lo, hi] = std::minmax_element(begin, begin + group_size);
    total += *hi - *lo;
  }
  const std::size_t groups = data.rows.size() / g;
  return total / static_cast<double>(groups);
}

RotationRow report_row(const FitData& data, std::span<const double> target, const Composition& composition,
                       const EigenPairs& basis, int group_size) {
  const int order = hadamard_order(data.dim);
  const auto d = static_cast<std::size_t>(data.dim);
  const std::vector<double> r = compose(composition, basis.vectors, data.dim, order);
  const RotatedData rotated = rotate(data, r, {});

  RotationRow row{.recipe = composition.recipe};
  for (const float x : rotated.rows) row.largest = std::max(row.largest, double{std::abs(x)});
  row.group_range = mean_group_range(rotated, group_size);

  std::vector<double> diagonal(d, 0.0);  // diag(R^T C R), in double
  for (std::size_t j = 0; j < d; ++j)
    for (std::size_t a = 0; a < d; ++a) {
      double inner = 0.0;
      for (std::size_t b = 0; b < d; ++b) inner += target[a * d + b] * r[b * d + j];
      diagonal[j] += r[a * d + j] * inner;
    }
  double sum = 0.0;
  for (const double value : diagonal) sum += value;
  row.importance_peak = *std::max_element(diagonal.begin(), diagonal.end()) / (sum / data.dim);
  // A permutation after the Hadamard mixes blocks. With one block, as for every power of two, blocks stay as they are.
  const std::size_t block = order == data.dim || !composition.uses('P') ? static_cast<std::size_t>(order) : 1;
  for (std::size_t start = 0; start < d; start += block) {
    double mean = 0.0;
    for (std::size_t j = start; j < start + block; ++j) mean += diagonal[j] / static_cast<double>(block);
    for (std::size_t j = start; j < start + block; ++j)
      row.importance_spread = std::max(row.importance_spread, std::abs(diagonal[j] - mean) / mean);
  }
  const UniformCoder int2{.bits = 2, .group_size = group_size, .scale_type = ScaleType::fp32};
  const RotatedData unweighted{.dim = rotated.dim, .rows = rotated.rows};
  row.error_trace = coding_cost(unweighted, int2, 1.0) / static_cast<double>(data.count());
  return row;
}

}  // namespace

std::vector<RotationRow> rotation_rows(const FitData& data, std::span<const double> target, int group_size) {
  const EigenPairs basis = eigh(target, data.dim);
  std::vector<RotationRow> rows;
  for (const char* name : {"i", "h", "u", "uh", "uhp"})
    rows.push_back(report_row(data, target, *find_composition(name), basis, group_size));
  return rows;
}

double top8_alignment(std::span<const double> a, std::span<const double> b, int dim) {
  const EigenPairs ua = eigh(a, dim), ub = eigh(b, dim);
  const int count = std::min(8, dim);
  double total = 0.0;
  for (int k = 0; k < count; ++k) {
    double cosine = 0.0;
    for (std::size_t at = static_cast<std::size_t>(k); at < ua.vectors.size(); at += static_cast<std::size_t>(dim))
      cosine += ua.vectors[at] * ub.vectors[at];
    total += std::abs(cosine);
  }
  return total / count;
}

}  // namespace kvq
