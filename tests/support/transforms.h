#pragma once

#include <cstdint>
#include <vector>

namespace kvq::test {

/// An invertible map and its inverse, [D, D] row-major, each rounded once.
struct Transform {
  std::vector<float> matrix, inverse;
};

/// A random transform: orthogonal x diagonal of log-uniform size x orthogonal, with transform_condition() of about
/// `condition`. Rows are then multiplied by random powers of two from 2^-spread to 2^spread, so that channels differ in
/// size. These factors do not change the condition.
Transform random_transform(int dim, double condition, std::uint64_t seed, int spread = 0);
/// `count` transforms, one after the other.
Transform random_transforms(int count, int dim, double condition, std::uint64_t seed, int spread = 0);

/// Random bfloat16 numbers from 2^-spread to 2^spread, [count, D].
/// @param pairs   channels i and i + D/2 have the same number
/// @param digits  significant binary digits of each number, 1 to 8; 1: powers of two
std::vector<float> random_scales(int count, int dim, int spread, std::uint64_t seed, bool pairs = false,
                                 int digits = 8);

}  // namespace kvq::test
