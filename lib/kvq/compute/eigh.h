#pragma once

#include <span>
#include <vector>

namespace kvq {

struct EigenPairs {
  std::vector<double> values;   ///< [D] descending
  std::vector<double> vectors;  ///< [D, D] row-major, column j belongs to values[j]
};

/// Eigendecomposition of a symmetric matrix [D, D] in double, in canonical form: eigenvalues descending, equal ones in
/// the solver's order; each vector's component of largest magnitude is positive (the first one on ties). Eigen's
/// solver, not LAPACK's, so that the result does not depend on which BLAS is installed.
/// @throws Error{numerical} if it does not converge or the input is not finite
EigenPairs eigh(std::span<const double> symmetric, int dim);

}  // namespace kvq
