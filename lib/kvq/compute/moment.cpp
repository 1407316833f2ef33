#include <kvq/compute/blas.h>
#include <kvq/compute/moment.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {
/// Rows converted and multiplied at a time: 256 x 128 doubles stay in the second-level cache.
constexpr std::size_t kRowsAtOnce = 256;
}  // namespace

MomentSum::MomentSum(int d)
    : dim(d),
      sum(static_cast<std::size_t>(d) * static_cast<std::size_t>(d), 0.0),
      mean(static_cast<std::size_t>(d), 0.0) {}

void MomentSum::add(std::span<const float> rows, std::span<const float> weights) {
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t count = rows.size() / d;
  KVQ_ASSERT(rows.size() == count * d && (weights.empty() || weights.size() == count));
  std::vector<double> block(std::min(count, kRowsAtOnce) * d);
  for (std::size_t first = 0; first < count; first += kRowsAtOnce) {
    const std::size_t n = std::min(kRowsAtOnce, count - first);
    for (std::size_t t = 0; t < n; ++t) {
      const float* x = rows.data() + (first + t) * d;
      const double w = weights.empty() ? 1.0 : weights[first + t];
      const double root = weights.empty() ? 1.0 : std::sqrt(w);
      double* y = block.data() + t * d;
      for (std::size_t j = 0; j < d; ++j) y[j] = root * x[j];
      for (std::size_t j = 0; j < d; ++j) mean[j] += w * x[j];
      weight += w;
    }
    blas::syrk(dim, static_cast<std::int64_t>(n), block.data(), dim, sum.data(), dim);
  }
}

void MomentSum::add(const MomentSum& other) {
  KVQ_ASSERT(dim == other.dim);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += other.sum[i];
  for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += other.mean[i];
  weight += other.weight;
}

void MomentSum::subtract(const MomentSum& other) {
  KVQ_ASSERT(dim == other.dim);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] -= other.sum[i];
  for (std::size_t i = 0; i < mean.size(); ++i) mean[i] -= other.mean[i];
  weight -= other.weight;
}

void MomentSum::symmetrize() {
  const auto d = static_cast<std::size_t>(dim);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < i; ++j) sum[i * d + j] = sum[j * d + i];
}

}  // namespace kvq
