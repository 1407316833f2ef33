#pragma once

#include <kvq/plan/bit_reversal.h>

#include <cstdint>
#include <span>
#include <vector>

/// Rotations that need no data. Matrices are [D, D] double, row-major; a row x of activations becomes x R.
namespace kvq {

/// blockdiag(H_n, ..., H_n), n = order, normalized Walsh-Hadamard in Sylvester's order (OSCAR A.1).
/// @throws Error{usage} unless order is a power of two that divides dim
std::vector<double> block_hadamard_matrix(int dim, int order);

/// The same transform of float rows [rows, dim] in place, by butterflies; `signs` is [dim] of +1, -1, or empty.
void block_hadamard_rows(std::span<float> rows, int dim, int order, std::span<const std::int8_t> signs);

/// Uniformly distributed orthogonal matrix (Haar): QR of a Gaussian matrix with a positive diagonal of R.
std::vector<double> haar_matrix(int dim, std::uint64_t seed, int layer, int head);

/// Random +1 and -1, from the counter-based generator.
std::vector<std::int8_t> random_signs(int dim, std::uint64_t seed, int layer, int head);

}  // namespace kvq
