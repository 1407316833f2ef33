#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

/// Bit allocation: gives each block a width, to minimize J(b) = sum_i s_i D(b_i). D(b) is 4^-b as in the paper
/// (Block-GTQ, arXiv 2606.24033, section 4), or the distortion of the coder that will be used.
namespace kvq {

/// D(0) .. D(8), falling and convex: the relative squared error of a code of b bits.
using RateLaw = std::array<double, 9>;
/// 4^-b
const RateLaw& paper_law();

/// Algorithm 1 of the paper: every block starts at min_bits; each further bit goes where it lowers J most, s_i (D(b) -
/// D(b + 1)), the lowest index on a tie. Optimal for any budget, because gains fall with each bit (Theorem 1). Blocks
/// of score 0 gain nothing; they share the remaining bits evenly, so that the whole budget is always spent.
/// @param scores  [L] finite, at least 0
/// @param budget  sum of all widths, from L * min_bits to L * max_bits
/// @throws        Error{usage} naming the range of the budget
std::vector<std::uint8_t> greedy_allocation(std::span<const double> scores, int budget, int min_bits, int max_bits,
                                            const RateLaw& law = paper_law());

/// Sum of all widths for an average, rounded down as the paper does: floor(L * mean_bits).
int total_bits(double mean_bits, int blocks);

/// J(b)
double allocation_objective(std::span<const double> scores, std::span<const std::uint8_t> bits,
                            const RateLaw& law = paper_law());

/// A byte budget for one head's mixed row, laid out as in packing.md.
struct RowBudget {
  int row_bytes = 0;  ///< of one head's whole row
  int scale_bytes = 2;
  int index_bytes = 0;
  int channels_per_block = 2;
  int min_bits = 1, max_bits = 8;
  bool row_scale = false;  ///< the row has one scale, not one for each width
};

/// The allocation of smallest J whose row fits: exact, over all counts of blocks at the widths 8, 4, 3, 2, 1 (and 0 if
/// min_bits is 0), with a scale for each width that occurs, or one for the row. Widths 5 to 7 are left out, because
/// their codes take as many bytes as those of width 8. A block with fewer channels counts as a full block.
/// @throws  Error{usage} if min_bits for all blocks do not fit, naming the bytes that they take
std::vector<std::uint8_t> byte_allocation(std::span<const double> scores, const RowBudget& budget,
                                          const RateLaw& law = paper_law());

}  // namespace kvq
