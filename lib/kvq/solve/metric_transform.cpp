#include <kvq/core/dtype.h>
#include <kvq/core/error.h>
#include <kvq/solve/metric_transform.h>

#include <Eigen/Cholesky>
#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvq {

namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

/// Least part of the mean diagonal that is added to the diagonals, so that the matrices are invertible in directions
/// without variance or metric.
constexpr double kFloor = 1e-13;
/// Least mean of a channel, for rows of mean square 1, that decides a sign.
constexpr double kNoMean = 1e-6;

std::vector<double> to_vector(const Matrix& matrix) { return {matrix.data(), matrix.data() + matrix.size()}; }

Vector diagonal_of(std::span<const double> matrix, int dim) {
  Vector diagonal(dim);
  for (int i = 0; i < dim; ++i)
    diagonal[i] = std::max(0.0, matrix[static_cast<std::size_t>(i) * static_cast<std::size_t>(dim + 1)]);
  return diagonal;
}

/// (w_i / c_i)^(1/4) where both are positive; elsewhere the geometric mean of these factors, or 1 if there are none.
Vector balance_of(const Vector& c, const Vector& w) {
  double logs = 0.0;
  int count = 0;
  Vector a(c.size());
  for (Eigen::Index i = 0; i < c.size(); ++i) {
    a[i] = c[i] > 0.0 && w[i] > 0.0 ? std::sqrt(std::sqrt(w[i] / c[i])) : 0.0;
    if (!(a[i] > 0.0 && std::isfinite(a[i]))) {
      a[i] = 0.0;
      continue;
    }
    logs += std::log(a[i]);
    ++count;
  }
  const double middle = count > 0 ? std::exp(logs / count) : 1.0;
  for (Eigen::Index i = 0; i < c.size(); ++i)
    if (a[i] == 0.0) a[i] = middle;
  return a;
}

/// Root mean square over channels of |row i of A| |column i of A^-1|, as transform_condition() of plans.
double condition_of(const Matrix& a, const Matrix& inverse) {
  double total = 0.0;
  for (Eigen::Index i = 0; i < a.rows(); ++i) total += a.row(i).squaredNorm() * inverse.col(i).squaredNorm();
  return std::sqrt(total / static_cast<double>(a.rows()));
}

struct Balanced {
  Matrix matrix, inverse;
  double root_trace = 0.0;  ///< sum of sqrt(s)
};

/// @param c, w   scaled to equal diagonals by `a`; `more` of their mean diagonal is added
Balanced balance(const Matrix& c, const Matrix& w, const Vector& a, std::span<const double> mean, double more) {
  const Eigen::Index dim = c.rows();
  Matrix covariance = c, metric = w;
  covariance.diagonal().array() += more * c.trace() / static_cast<double>(dim);
  metric.diagonal().array() += more * w.trace() / static_cast<double>(dim);
  const Eigen::LLT<Matrix> cholesky(covariance);
  if (cholesky.info() != Eigen::Success) return {};
  const Matrix l = cholesky.matrixL();
  const Matrix between = l.transpose() * metric * l;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(Eigen::MatrixXd{0.5 * (between + between.transpose())});
  if (solver.info() != Eigen::Success) return {};
  Vector s = solver.eigenvalues().reverse();
  Matrix v = solver.eigenvectors().rowwise().reverse();
  if (!(s[0] > 0.0)) return {};
  s = s.cwiseMax(s[0] * std::numeric_limits<double>::epsilon());
  const Vector root = s.cwiseSqrt();
  // Mean square 1: the trace of A^T C A is that of diag(sqrt(s)).
  const double unit = std::sqrt(static_cast<double>(dim) / root.sum());
  const Vector fourth = root.cwiseSqrt() * unit;
  Balanced result;
  result.matrix =
      a.asDiagonal() * Matrix(l.transpose().triangularView<Eigen::Upper>().solve(Matrix(v * fourth.asDiagonal())));
  result.inverse = fourth.cwiseInverse().asDiagonal() * v.transpose() * l.transpose() * a.cwiseInverse().asDiagonal();
  for (Eigen::Index j = 0; j < dim; ++j) {
    double direction = 0.0;
    for (std::size_t i = 0; i < mean.size(); ++i) direction += mean[i] * result.matrix(static_cast<Eigen::Index>(i), j);
    if (std::abs(direction) < kNoMean) {
      Eigen::Index largest = 0;
      for (Eigen::Index i = 1; i < dim; ++i)
        if (std::abs(result.matrix(i, j)) / a[i] > std::abs(result.matrix(largest, j)) / a[largest]) largest = i;
      direction = result.matrix(largest, j);
    }
    if (direction >= 0.0) continue;
    result.matrix.col(j) *= -1.0;
    result.inverse.row(j) *= -1.0;
  }
  result.root_trace = root.sum();
  return result;
}

struct Problem {
  Matrix c, w;  ///< scaled to equal diagonals
  Vector scale;
  bool empty = false;  ///< no variance, or no metric: nothing to balance
};

Problem equal_diagonals(std::span<const double> c, std::span<const double> w, int dim) {
  const auto size = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim);
  KVQ_ASSERT(c.size() == size && w.size() == size);
  const Eigen::Map<const Matrix> covariance(c.data(), dim, dim), metric(w.data(), dim, dim);
  if (!covariance.allFinite() || !metric.allFinite())
    throw Error{ErrorKind::numerical, "transform: covariance or metric holds NaN or Inf"};
  Problem p;
  p.scale = balance_of(diagonal_of(c, dim), diagonal_of(w, dim));
  p.c = p.scale.asDiagonal() * covariance * p.scale.asDiagonal();
  p.w = p.scale.cwiseInverse().asDiagonal() * metric * p.scale.cwiseInverse().asDiagonal();
  p.empty = !(p.c.trace() > 0.0 && p.w.trace() > 0.0);
  return p;
}

double added_below(std::int64_t tokens, int dim) {
  const double needed = static_cast<double>(dim) / static_cast<double>(std::max<std::int64_t>(tokens, 1));
  return std::max(kFloor, needed - 1.0 / kTokensPerChannel);
}

double gain_of(std::span<const double> c, std::span<const double> w, int dim, double root_trace) {
  const double gain = diagonal_of(c, dim).sum() * diagonal_of(w, dim).sum() / (root_trace * root_trace);
  return std::isfinite(gain) ? std::max(1.0, gain) : 1.0;
}

HeadTransform identity(int dim) {
  const Matrix one = Matrix::Identity(dim, dim);
  return {.scale = {}, .matrix = to_vector(one), .inverse = to_vector(one), .outlier_gain = 1.0};
}

}  // namespace

const char* to_string(TransformKind kind) {
  switch (kind) {
    case TransformKind::orthogonal: return "orthogonal";
    case TransformKind::diagonal: return "diagonal";
    case TransformKind::balanced: return "balanced";
    case TransformKind::klt: return "klt";
  }
  return "?";
}

double outlier_gain(std::span<const double> c, std::span<const double> w, int dim, std::int64_t tokens) {
  const Problem p = equal_diagonals(c, w, dim);
  if (p.empty) return 1.0;
  const Balanced found = balance(p.c, p.w, p.scale, {}, added_below(tokens, dim));
  return found.root_trace > 0.0 ? gain_of(c, w, dim, found.root_trace) : 1.0;
}

HeadTransform diagonal_transform(std::span<const double> c, std::span<const double> w, int dim, std::int64_t tokens,
                                 const ChannelPairs& pairs) {
  const Vector own_c = diagonal_of(c, dim), own_w = diagonal_of(w, dim);
  Vector shared_c = own_c, shared_w = own_w;
  for (const auto& [i, j] : pairs) {
    shared_c[i] = shared_c[j] = own_c[i] + own_c[j];
    shared_w[i] = shared_w[j] = own_w[i] + own_w[j];
  }
  const Vector exact = balance_of(shared_c, shared_w);
  const double energy = (own_c.array() * exact.array().square()).sum() / dim;
  const double unit = energy > 0.0 ? 1.0 / std::sqrt(energy) : 1.0;
  Vector best(dim);
  for (int i = 0; i < dim; ++i)
    best[i] = bf16_to_float(float_to_bf16(static_cast<float>(std::clamp(exact[i] * unit, 0x1p-24, 0x1p24))));
  HeadTransform result{
      .scale = {best.data(), best.data() + dim},
      .matrix = to_vector(Matrix(best.asDiagonal())),
      .inverse = to_vector(Matrix(best.cwiseInverse().asDiagonal())),
      .outlier_gain = outlier_gain(c, w, dim, tokens),
  };
  return result;
}

HeadTransform balanced_transform(std::span<const double> c, std::span<const double> w, std::span<const double> mean,
                                 int dim, std::int64_t tokens, double most_condition) {
  const Problem p = equal_diagonals(c, w, dim);
  if (p.empty) return identity(dim);
  double more = added_below(tokens, dim);
  while (more <= 1e3) {
    const Balanced found = balance(p.c, p.w, p.scale, mean, more);
    if (found.matrix.size() > 0 && found.matrix.allFinite() && found.inverse.allFinite() &&
        condition_of(found.matrix, found.inverse) <= most_condition)
      return {
          .scale = {},
          .matrix = to_vector(found.matrix),
          .inverse = to_vector(found.inverse),
          .outlier_gain = gain_of(c, w, dim, found.root_trace),
      };
    more *= 10.0;
  }
  throw Error{ErrorKind::numerical, "transform: covariance and metric are too far from positive semidefinite"};
}

}  // namespace kvq
