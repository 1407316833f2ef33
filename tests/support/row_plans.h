#pragma once

#include <kvq/plan/layer_plan.h>

#include "support/random_data.h"

#include <cstdint>
#include <vector>

/// Plans of one head with the codes of packing.md 1.1 and made-up tables.
namespace kvq::test {

/// [2^bits] strictly ascending, approximately symmetric.
std::vector<float> random_table(int bits, std::uint64_t seed);
CodebookCoder codebook_coder(int bits, int group_size, ScaleRule rule, ScaleType type, std::uint64_t seed);

/// Thetas that differ from the shipped ones, for each of `widths` for which the format allows a theta. Each is searched
/// in integers if its width plus the seed is even.
/// @param most_state_bits  upper limit of bits * memory
TrellisCoder trellis_coder(const std::vector<int>& widths, int group_size, ScaleRule rule, ScaleType type,
                           std::uint64_t seed, int most_state_bits = 6);

/// One plan for each coder, with one width and one group in a row: affine with both kinds of zero, symmetric, codebook,
/// trellis.
std::vector<TensorPlan> plain_plans(int bits, int group_size, ScaleType type);

/// Random widths in descending order, from 8 to 0; each width may be absent.
std::vector<std::uint8_t> descending_widths(Random& random, int dim);
/// A plan with these widths; coder 0 is symmetric, 1 codebook, 2 trellis.
TensorPlan mixed_plan(const std::vector<std::uint8_t>& widths, int dim, int coder, ScaleType type, std::uint64_t seed);
/// Gives the rows of a mixed plan one scale each, with random gains.
void add_row_scale(TensorPlan& plan, std::uint64_t seed);
void add_centroids(TensorPlan& plan, int dim, int count, std::uint64_t seed, int heads = 1);

}  // namespace kvq::test
