#pragma once

#include <kvq/plan/rotation.h>

#include <cstddef>
#include <span>
#include <vector>

namespace kvq {

/// A of one entry of a rotation's arrays as a matrix in double, [D, D] row-major, and A^-1; empty for the identity.
/// @param entry  Rotation::head_index() of a KV head
std::vector<double> rotation_matrix(const Rotation& rotation, int entry, int dim);
std::vector<double> inverse_matrix(const Rotation& rotation, int entry, int dim);

/// Normalized Walsh-Hadamard transform of neighboring blocks, in place: Sylvester's order, OSCAR A.1.
/// @param order  power of two that divides the size of x
void block_hadamard(std::span<double> x, std::size_t order);

}  // namespace kvq
