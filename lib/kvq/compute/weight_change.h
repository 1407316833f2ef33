#pragma once

#include <cstdint>

/// What a change of the logits does to a row of softmax weights, without differences of nearly equal numbers: with p
/// the exact weights, delta the change of the logits and x = delta - sum p delta, the new weights are p' = p exp(x) /
/// Z, and
///     KL(p || p') = log Z = log(1 + sum p (exp(x) - 1 - x)).
namespace kvq {

double sum_of(const float* row, std::int64_t count);
/// Also where squares leave the range of float: infinite or below 1e-25, a piece is summed in double.
double sum_of_squares(const float* row, std::int64_t count);
double dot_product(const float* a, const float* b, std::int64_t count);

/// KL(p || p') in nats.
/// @param p       [count] softmax of the logits, sum near 1; below e^-87 of the largest it may be 0
/// @param logits  [count] for rows whose x passes 60, where such a weight may win: those are computed from the logits
/// in double, slowly
/// @param delta   [count] change of the logits; becomes p' - p
double change_weights(const float* p, const float* logits, float* delta, std::int64_t count);

}  // namespace kvq
