#include <kvq/codec/codec.h>
#include <kvq/compute/blas.h>
#include <kvq/compute/moment.h>
#include <kvq/core/error.h>
#include <kvq/solve/fit.h>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// sum_t w_t e_t M e_t^T; e is [n, D] and is overwritten when there is no metric.
double quadratic_sum(const std::vector<float>& e, const std::vector<float>& metric, const std::vector<float>& weights, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t n = e.size() / d;
  std::vector<float> product;
  if (!metric.empty()) {
    product.resize(e.size());
    blas::gemm_nn(static_cast<std::int64_t>(n), dim, dim, e.data(), dim, metric.data(), dim, false, product.data(), dim);
  }
  const std::vector<float>& other = metric.empty() ? e : product;
  double total = 0.0;
  for (std::size_t t = 0; t < n; ++t) {
    float row = 0.0f;
    for (std::size_t j = 0; j < d; ++j) row += e[t * d + j] * other[t * d + j];
    total += double{row} * (weights.empty() ? 1.0 : double{weights[t]});
  }
  return total;
}

std::vector<float> coding_error(const RotatedData& data, const Coder& coder, double clip_ratio) {
  const auto d = static_cast<std::size_t>(data.dim);
  std::vector<float> e(data.rows);
  for (std::size_t start = 0; start < e.size(); start += d) {
    const std::span<float> row{e.data() + start, d};
    quantize_row(coder, clip_ratio, row);
    for (std::size_t j = 0; j < d; ++j) row[j] -= data.rows[start + j];
  }
  return e;
}

}  // namespace

RotatedData rotate(const FitData& data, std::span<const double> rotation, std::span<const float> center) {
  const auto d = static_cast<std::size_t>(data.dim);
  RotatedData out{data.dim, data.rows, {data.metric.begin(), data.metric.end()}, data.weights};
  if (!center.empty())
    for (std::size_t i = 0; i < out.rows.size(); ++i) out.rows[i] -= center[i % d];
  if (rotation.empty()) return out;
  const std::vector<float> r(rotation.begin(), rotation.end());
  const std::vector<float> centered(out.rows);
  blas::gemm_nn(data.count(), data.dim, data.dim, centered.data(), data.dim, r.data(), data.dim, false, out.rows.data(), data.dim);
  if (!data.metric.empty()) {
    const Eigen::Map<const Matrix> m(data.metric.data(), data.dim, data.dim), rot(rotation.data(), data.dim, data.dim);
    const Matrix turned = rot.transpose() * m * rot;
    out.metric.assign(turned.data(), turned.data() + turned.size());
  }
  return out;
}

double coding_cost(const RotatedData& data, const Coder& coder, double clip_ratio) {
  return quadratic_sum(coding_error(data, coder, clip_ratio), data.metric, data.weights, data.dim);
}

double energy(const RotatedData& data) { return quadratic_sum(data.rows, data.metric, data.weights, data.dim); }

std::vector<double> error_covariance(const RotatedData& data, const Coder& coder, double clip_ratio) {
  MomentSum sum(data.dim);
  sum.add(coding_error(data, coder, clip_ratio));
  sum.symmetrise();
  for (double& value : sum.sum) value /= sum.weight;
  return sum.sum;
}

ClipChoice search_clip(std::span<const RotatedData> heads, const UniformCoder& coder) {
  ClipChoice best{1.0, 0.0};
  std::vector<std::size_t> tried;
  for (int percent = 100; percent >= 85; --percent) {
    const double ratio = percent / 100.0;
    // Ratios that name the same order statistic give the same codes.
    const auto dim = static_cast<std::size_t>(heads.front().dim);
    const std::size_t index = std::min(static_cast<std::size_t>(std::floor(ratio * static_cast<double>(dim))), dim - 1);
    if (std::find(tried.begin(), tried.end(), index) != tried.end()) continue;
    tried.push_back(index);
    double cost = 0.0;
    for (const RotatedData& data : heads) cost += coding_cost(data, coder, ratio);
    if (percent == 100 || cost < best.cost) best = {ratio, cost};
  }
  return best;
}

}  // namespace kvq
