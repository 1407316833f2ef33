#include <kvq/compute/eigh.h>
#include <kvq/core/error.h>

#include <Eigen/Eigenvalues>

#include <cmath>

namespace kvq {

EigenPairs eigh(std::span<const double> symmetric, int dim) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  KVQ_ASSERT(symmetric.size() == static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim));
  const Eigen::Map<const Matrix> input(symmetric.data(), dim, dim);
  if (!input.allFinite()) throw Error{ErrorKind::numerical, "eigendecomposition: the matrix holds NaN or Inf"};
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(Eigen::MatrixXd{0.5 * (input + input.transpose())});
  if (solver.info() != Eigen::Success) throw Error{ErrorKind::numerical, "eigendecomposition did not converge"};

  EigenPairs result{std::vector<double>(static_cast<std::size_t>(dim)), std::vector<double>(symmetric.size())};
  for (int j = 0; j < dim; ++j) {
    const int source = dim - 1 - j;  // the solver's order is ascending
    result.values[static_cast<std::size_t>(j)] = solver.eigenvalues()[source];
    int largest = 0;
    for (int i = 1; i < dim; ++i)
      if (std::abs(solver.eigenvectors()(i, source)) > std::abs(solver.eigenvectors()(largest, source))) largest = i;
    const double sign = solver.eigenvectors()(largest, source) < 0.0 ? -1.0 : 1.0;
    auto at = static_cast<std::size_t>(j);
    for (int i = 0; i < dim; ++i, at += static_cast<std::size_t>(dim))
      result.vectors[at] = sign * solver.eigenvectors()(i, source);
  }
  return result;
}

}  // namespace kvq
