#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/plan/table_layout.h>

#include <optional>
#include <span>
#include <vector>

namespace kvq {

/// The codebook of a width; empty if the coder has none for it.
/// @param entry  of the head: Rotation::head_index()
std::span<const float> codebook_of(const CodebookCoder& coder, int width, int entry);

/// Weights of the odd sets of bits of a codebook's entries (table_layout.h).
/// @param table  [2^b], b = 3 or 4
/// @return       [odd_sets(b)]
std::vector<double> odd_weights(std::span<const float> table);

/// Whether a codebook is the sum of its odd sets, up to the rounding of floats: whether it is symmetric about 0.
bool is_odd_table(std::span<const float> table);

/// A codebook as the largest levels that fit, or nothing if no step gives integers up to kMostLevel, to the rounding of
/// floats.
/// @param table  [2^b], b <= kMostLevelBits
std::optional<LevelTable> level_table(std::span<const float> table);

/// A codebook whose entries have levels: those nearest to the entries of another one, with the step, of a largest level
/// above kMostLevel / 2, for which the sum of squared distances is smallest. A codebook of more bits than
/// kMostLevelBits is only rounded to floats. Symmetric codebooks stay symmetric. Neighboring entries may become equal.
/// @param entries  [2^b], ascending
std::vector<float> level_grid(std::span<const double> entries);

/// The levels of all heads of rows with table_bits(); else empty. @return  [num_kv_heads]
std::vector<LevelTable> level_tables(const TensorPlan& plan, int num_kv_heads, int dim);

/// Bits of the codes of rows that are one group of codebook codes with one scale, for which there are tuned kernels; 0
/// for all other rows.
int table_bits(const TensorPlan& plan, int dim);

/// Bits of the codes of rows for which there is a tuned write of codebook codes: head_dim 128, fp16 scales by the rule
/// norm or rms, any codebooks. Rows of one group have 2, 3 or 4 bits. kMixedBits for keys of several widths up to
/// kMostLevelBits in up to 16 words; 0 for all other rows.
int codebook_row_bits(const TensorPlan& plan, int dim, Side side);

/// The weights of all heads of such rows, rounded to floats. @return  [num_kv_heads, odd_sets(b)]
std::vector<float> table_weights(const TensorPlan& plan, int num_kv_heads, int dim);

}  // namespace kvq
