#pragma once

#include <kvq/plan/rotation.h>

#include <vector>

namespace kvq {

/// A of one entry of a rotation's arrays as a matrix in double, [D, D] row-major, and A^-1; empty for the identity.
/// @param entry  Rotation::head_index() of a KV head
std::vector<double> rotation_matrix(const Rotation& rotation, int entry, int dim);
std::vector<double> inverse_matrix(const Rotation& rotation, int entry, int dim);

}  // namespace kvq
