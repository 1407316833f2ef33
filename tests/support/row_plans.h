#pragma once

#include <kvq/plan/layer_plan.h>

#include "support/random_data.h"

#include <cstdint>
#include <vector>

/// Plans of one head in the codes of packing.md 1.1, with made-up tables.
namespace kvq::test {

/// [2^bits] strictly ascending, about symmetric.
std::vector<float> random_table(int bits, std::uint64_t seed);
CodebookCoder codebook_coder(int bits, int group_size, ScaleRule rule, ScaleType type, std::uint64_t seed);

/// Thetas that are no shipped ones, for those of `widths` that the format allows one for.
/// @param most_state_bits  bits * memory at most
TrellisCoder trellis_coder(const std::vector<int>& widths, int group_size, ScaleRule rule, ScaleType type,
                           std::uint64_t seed, int most_state_bits = 6);

/// Every coder at one width, one group in a row: affine with both zeros, symmetric, codebook, trellis.
std::vector<TensorPlan> plain_plans(int bits, int group_size, ScaleType type);

/// Some widths from 8 down to 0, any of them missing.
std::vector<std::uint8_t> descending_widths(Random& random, int dim);
/// A plan with these widths; coder 0 is symmetric, 1 codebook, 2 trellis.
TensorPlan mixed_plan(const std::vector<std::uint8_t>& widths, int dim, int coder, ScaleType type, std::uint64_t seed);
void add_centroids(TensorPlan& plan, int dim, int count, std::uint64_t seed, int heads = 1);

}  // namespace kvq::test
