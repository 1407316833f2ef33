#pragma once

#include <cstdint>
#include <vector>

namespace kvq::test {

/// An invertible map and its inverse, [D, D] row-major, each rounded once.
struct Transform {
  std::vector<float> matrix, inverse;
};

/// Orthogonal, times stretches of log-uniform size, times orthogonal: transform_condition() is about `condition`. Its
/// rows are then multiplied by random powers of two from 2^-spread to 2^spread, which changes no condition: channels of
/// different sizes.
Transform random_transform(int dim, double condition, std::uint64_t seed, int spread = 0);
/// Several of them, one after the other.
Transform random_transforms(int count, int dim, double condition, std::uint64_t seed, int spread = 0);

/// bfloat16 numbers from 2^-spread to 2^spread, [count, D].
/// @param pairs   channels i and i + D/2 share one
/// @param digits  of each number, 1 to 8; 1 = powers of two
std::vector<float> random_scales(int count, int dim, int spread, std::uint64_t seed, bool pairs = false,
                                 int digits = 8);

}  // namespace kvq::test
