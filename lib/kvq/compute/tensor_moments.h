#pragma once

#include <kvq/compute/backend.h>

#include <span>
#include <vector>

/// Verbs of the CPU backend over whole tensors: a task is a range of a head's tokens with fixed borders, and partial
/// sums are added in the order of the ranges.
namespace kvq {

/// Backend::second_moments().
std::vector<MomentSum> second_moments(const TensorView& rows, const MomentRequest& request);
/// Backend::quadratic_forms().
std::vector<float> quadratic_forms(const TensorView& rows, std::span<const double> matrices,
                                   const MomentRequest& request);

}  // namespace kvq
