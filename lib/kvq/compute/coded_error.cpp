#include <kvq/codec/codec.h>
#include <kvq/codec/poisoned.h>
#include <kvq/compute/blas.h>
#include <kvq/compute/coded_error.h>
#include <kvq/compute/moment.h>
#include <kvq/core/error.h>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Rows times the metric, [n, D].
std::vector<float> times_metric(const std::vector<float>& rows, const std::vector<float>& metric, int dim) {
  if (metric.empty()) return rows;
  std::vector<float> product(rows.size());
  blas::gemm_nn(static_cast<std::int64_t>(rows.size()) / dim, dim, dim, rows.data(), dim, metric.data(), dim, false,
                product.data(), dim);
  return product;
}

/// sum_t w_t a_t . b_t
double weighted_dot(const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& weights,
                    int dim) {
  const auto d = static_cast<std::size_t>(dim);
  double total = 0.0;
  for (std::size_t t = 0; t < a.size() / d; ++t) {
    float row = 0.0f;
    for (std::size_t j = 0; j < d; ++j) row += a[t * d + j] * b[t * d + j];
    total += double{row} * (weights.empty() ? 1.0 : double{weights[t]});
  }
  return total;
}

std::vector<float> coding_error(const std::vector<float>& rows, int dim, const RowCodec& codec) {
  const auto d = static_cast<std::size_t>(dim);
  std::vector<float> e(rows);
  for (std::size_t start = 0; start < e.size(); start += d) {
    const std::span<float> row{e.data() + start, d};
    expect_finite(row);
    codec.quantize(row);
    for (std::size_t j = 0; j < d; ++j) row[j] -= rows[start + j];
  }
  return e;
}

/// sum_t w_t x_t M x_t^T in double. @param rows  [n, D]
double quadratic(const FitData& data, const std::vector<float>& rows) {
  MomentSum sum(data.dim);
  sum.add(rows, data.weights);
  sum.symmetrize();
  const Eigen::Map<const Matrix> moment(sum.sum.data(), data.dim, data.dim);
  if (data.metric.empty()) return moment.trace();
  return moment.cwiseProduct(Eigen::Map<const Matrix>(data.metric.data(), data.dim, data.dim)).sum();
}

}  // namespace

RotatedData rotate(const FitData& data, std::span<const double> rotation, std::span<const float> center) {
  const auto d = static_cast<std::size_t>(data.dim);
  RotatedData out{data.dim, data.rows, {data.metric.begin(), data.metric.end()}, data.weights, 1.0};
  if (!center.empty())
    for (std::size_t i = 0; i < out.rows.size(); ++i) out.rows[i] -= center[i % d];
  if (rotation.empty()) return out;
  const std::vector<float> r(rotation.begin(), rotation.end());
  const std::vector<float> centered(out.rows);
  blas::gemm_nn(data.count(), data.dim, data.dim, centered.data(), data.dim, r.data(), data.dim, false, out.rows.data(),
                data.dim);
  if (!data.metric.empty()) {
    const Eigen::Map<const Matrix> m(data.metric.data(), data.dim, data.dim), rot(rotation.data(), data.dim, data.dim);
    const Matrix turned = rot.transpose() * m * rot;
    out.metric.assign(turned.data(), turned.data() + turned.size());
  }
  return out;
}

double coding_cost(const RotatedData& data, const Coder& coder, double clip_ratio) {
  return coding_cost(data, RowCodec(coder, clip_ratio, data.dim));
}

double coding_cost(const RotatedData& data, const RowCodec& codec) {
  const std::vector<float> e = coding_error(data.rows, data.dim, codec);
  return weighted_dot(e, times_metric(e, data.metric, data.dim), data.weights, data.dim);
}

double energy(const RotatedData& data) {
  return weighted_dot(data.rows, times_metric(data.rows, data.metric, data.dim), data.weights, data.dim);
}

double coding_cost(const FitData& data, const RowCodec& codec) {
  return quadratic(data, coding_error(data.rows, data.dim, codec));
}

double energy(const FitData& data) { return quadratic(data, data.rows); }

double clip_cost(const RotatedData& data, const RowCodec& codec) {
  const std::vector<float> e = coding_error(data.rows, data.dim, codec);
  const std::vector<float> product = times_metric(e, data.metric, data.dim);
  const double total = weighted_dot(e, product, data.weights, data.dim);
  const double along = weighted_dot(data.rows, product, data.weights, data.dim), length = energy(data);
  return length > 0.0 ? total + (data.shrink_weight - 1.0) * along * along / length : total;
}

std::vector<double> error_covariance(const RotatedData& data, const RowCodec& codec) {
  MomentSum sum(data.dim);
  sum.add(coding_error(data.rows, data.dim, codec));
  sum.symmetrize();
  for (double& value : sum.sum) value /= sum.weight;
  return sum.sum;
}

}  // namespace kvq
