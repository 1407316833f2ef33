#pragma once

#include <cstdint>

/// Change of a row of softmax weights when its logits change, computed without differences of nearly equal numbers.
/// With p the exact weights, delta the change of the logits and x = delta - sum p delta, the new weights are p' = p
/// exp(x) / Z, and
///     KL(p || p') = log Z = log(1 + sum p (exp(x) - 1 - x)).
namespace kvq {

double sum_of(const float* row, std::int64_t count);
/// Squares are summed in pieces of 1024. A piece whose float sum is infinite or below 1e-25 is summed in double.
double sum_of_squares(const float* row, std::int64_t count);
double dot_product(const float* a, const float* b, std::int64_t count);

/// KL(p || p') in nats.
/// @param p       [count] softmax of the logits, sum near 1; a weight below e^-87 of the largest may be 0
/// @param logits  [count] read only if some x exceeds 60, because a weight of 0 may then become large: the row is
///                computed from the logits in double, slowly
/// @param delta   [count] change of the logits; becomes p' - p
double change_weights(const float* p, const float* logits, float* delta, std::int64_t count);

}  // namespace kvq
