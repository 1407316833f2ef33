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
/// are of doubles: an error is a rounding of double.
void add_moment(Context& context, const Rows& rows, const Weights& weights, MomentSum& into);

/// Backend::quadratic_forms() of the heads of `rows`. @param matrices  [heads, D, D]  @param forms  [heads, T]
void quadratic_forms(Context& context, const Rows& rows, const Weights& weights, std::span<const double> matrices,
                     float* forms);

/// Backend::eigh().
std::vector<EigenPairs> eigh(Context& context, std::span<const double> matrices, int dim);

}  // namespace kvq::cuda
