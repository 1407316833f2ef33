#pragma once

#include <kvq/compute/eigh.h>

#include <cstdint>
#include <span>
#include <vector>

/// Functions of square matrices [n, n] in double, row-major, written as plain loops: references for the library's
/// results.
namespace kvq::test {

std::vector<double> identity(int n);
std::vector<double> multiply(std::span<const double> a, std::span<const double> b, int n);
std::vector<double> transpose(std::span<const double> a, int n);
/// r^T c r: a second moment in rotated coordinates.
std::vector<double> conjugate(std::span<const double> c, std::span<const double> r, int n);
double trace(std::span<const double> a, int n);

/// Largest |a^T a - I|.
double orthogonality_defect(std::span<const double> a, int n);

/// Random orthogonal matrix, by Gram-Schmidt on a Gaussian matrix.
std::vector<double> random_orthogonal(int n, std::uint64_t seed);
/// Random symmetric positive matrix whose k-th eigenvalue is decay^k.
std::vector<double> random_covariance(int n, std::uint64_t seed, double decay = 0.9);

/// Eigenvalues, descending, and eigenvectors by Jacobi's rotations; signs of eigenvectors are arbitrary.
EigenPairs jacobi(std::vector<double> symmetric, int n);

/// Walsh-Hadamard matrix of Sylvester's order by its closed form: (-1)^popcount(i & j) / sqrt(n), blocks on the
/// diagonal.
std::vector<double> sylvester_blocks(int n, int order);

}  // namespace kvq::test
