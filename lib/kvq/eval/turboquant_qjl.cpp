#include <kvq/codec/codec.h>
#include <kvq/compute/blas.h>
#include <kvq/core/error.h>
#include <kvq/core/random.h>
#include <kvq/eval/turboquant_qjl.h>
#include <kvq/solve/sphere_codebook.h>
#include <kvq/solve/structured.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace kvq {

namespace {

double length(std::span<const float> row) {
  double sum = 0.0;
  for (const float x : row) sum += double{x} * double{x};
  return std::sqrt(sum);
}

void scale(std::span<float> row, double factor) {
  for (float& x : row) x = static_cast<float>(x * factor);
}

}  // namespace

TurboQuantQjl::TurboQuantQjl(int dim, int bits, std::uint64_t seed, int layer, int head) : dim_(dim) {
  KVQ_ASSERT(bits >= 1 && bits <= 8);
  const std::vector<double> rotation = haar_matrix(dim, seed, layer, head);
  rotation_.assign(rotation.begin(), rotation.end());
  RandomStream random(seed, RandomStream::Purpose::qjl, static_cast<std::uint32_t>(layer),
                      static_cast<std::uint32_t>(head));
  sketch_.resize(rotation_.size());
  for (float& entry : sketch_) entry = static_cast<float>(random.next_normal());
  entries_ = {0.0f};
  if (bits == 1) return;
  const double unit = 1.0 / std::sqrt(static_cast<double>(dim));
  entries_.clear();
  for (const double entry : sphere_codebook(bits - 1, dim).entries)
    entries_.push_back(static_cast<float>(entry * unit));
  for (std::size_t i = 1; i < entries_.size(); ++i) thresholds_.push_back(0.5f * (entries_[i - 1] + entries_[i]));
}

/// Replaces residuals [n, dim] by their reconstruction from signs and length.
void TurboQuantQjl::keep_sketch(std::span<float> residual) const {
  const auto d = static_cast<std::size_t>(dim_);
  const auto n = static_cast<std::int64_t>(residual.size() / d);
  std::vector<float> signs(residual.size());
  blas::gemm_nn(n, dim_, dim_, residual.data(), dim_, sketch_.data(), dim_, false, signs.data(), dim_);
  for (std::size_t row = 0; row < residual.size(); row += d) {
    const float kept = round_to(ScaleType::fp16, static_cast<float>(length(residual.subspan(row, d))));
    const auto factor = static_cast<float>(double{kept} * std::sqrt(std::numbers::pi / 2.0) / dim_);
    for (std::size_t j = row; j < row + d; ++j) signs[j] = signs[j] < 0.0f ? -factor : factor;
  }
  blas::gemm_nt(n, dim_, dim_, 1.0f, signs.data(), dim_, sketch_.data(), dim_, residual.data(), dim_);
}

void TurboQuantQjl::reconstruct(std::span<float> rows) const {
  const auto d = static_cast<std::size_t>(dim_);
  KVQ_ASSERT(rows.size() % d == 0);
  const auto n = static_cast<std::int64_t>(rows.size() / d);
  std::vector<float> lengths, y(rows.size()), coded(rows.size());
  for (std::size_t row = 0; row < rows.size(); row += d) {
    const double own = length(rows.subspan(row, d));
    lengths.push_back(round_to(ScaleType::fp16, static_cast<float>(own)));
    if (own > 0.0) scale(rows.subspan(row, d), 1.0 / own);
  }
  blas::gemm_nn(n, dim_, dim_, rows.data(), dim_, rotation_.data(), dim_, false, y.data(), dim_);
  for (std::size_t i = 0; i < y.size(); ++i) {
    coded[i] = entries_[static_cast<std::size_t>(std::upper_bound(thresholds_.begin(), thresholds_.end(), y[i]) -
                                                 thresholds_.begin())];
    y[i] -= coded[i];
  }
  keep_sketch(y);
  for (std::size_t i = 0; i < y.size(); ++i) coded[i] = lengths[i / d] * (coded[i] + y[i]);
  blas::gemm_nt(n, dim_, dim_, 1.0f, coded.data(), dim_, rotation_.data(), dim_, rows.data(), dim_);
}

}  // namespace kvq
