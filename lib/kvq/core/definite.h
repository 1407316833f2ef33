#pragma once

#include <cstddef>
#include <span>

namespace kvq {

/// Whether a symmetric matrix [dim, dim] has no eigenvalue below -slack, up to rounding: whether Cholesky's
/// decomposition of the matrix plus slack times the identity exists. A matrix of zeros passes. dim^3 / 6 multiply-adds.
/// @param slack  positive unless the matrix is zero
bool is_semidefinite(std::span<const double> matrix, std::size_t dim, double slack);

}  // namespace kvq
