#pragma once

#include <kvq/compute/backend.h>
#include <kvq/compute/cuda/context.h>

#include <span>
#include <vector>

namespace kvq::cuda {

/// Heads of a tensor on the device.
/// @param buffer  holds them
Rows upload_rows(Context& context, Buffer& buffer, const TensorView& tensor, int first_head, int heads,
                 std::int64_t first_token, std::int64_t tokens);

/// Adds the weighted second moment of all heads of `rows` to `into`, except the sum of the weights. Products and sums
/// are of doubles: an error is a rounding of double. The caller has claimed moment_bytes().
void add_moment(Context& context, const Rows& rows, const Weights& weights, MomentSum& into);

/// Backend::second_moments() of groups [first, first + count), neither symmetric yet nor with the sum of the weights.
/// @param sums  of all groups
void second_moments(Context& context, const TensorView& rows, const MomentRequest& request, int first, int count,
                    std::span<MomentSum> sums);

/// Backend::quadratic_forms() of heads [first, first + count).
/// @param matrices  [H, D, D] of all heads  @param forms  [H, T] of all heads
void quadratic_forms(Context& context, const TensorView& rows, std::span<const double> matrices,
                     const MomentRequest& request, int first, int count, std::span<float> forms);

/// Backend::eigh(), as many matrices at a time as there is room for.
std::vector<EigenPairs> eigh(Context& context, std::span<const double> matrices, int dim);

}  // namespace kvq::cuda
