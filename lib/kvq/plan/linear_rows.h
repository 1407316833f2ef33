#pragma once

#include <kvq/plan/layer_plan.h>

#include <span>
#include <vector>

/// Rows that are linear in their bits: x_hat_rot = s Theta b, with one stored scale s and bits b of +1/2 and -1/2
/// (packing.md, "One scale a row"). Tuned kernels for bit tiles multiply bits and know no coder. Theta is
/// linear_basis() of codec/.
namespace kvq {

/// What bit i of an index adds to an entry of a table, if bits count +1/2 and -1/2: of the linear function that is
/// nearest to the table.
/// @param table  [2^b]
/// @return       [b]
std::vector<double> bit_weights(std::span<const float> table);

/// Whether a table is that linear function, up to the rounding of floats: tables of 1 and 2 bits that are symmetric
/// about 0, and uniform ones.
bool is_linear_table(std::span<const float> table);

/// Whether the rows of a KV head are linear, with one scale or, without codes, none.
/// @param plan  valid
bool is_linear(const TensorPlan& plan, int kv_head, int dim);

/// Whether the rows of all KV heads are.
bool has_linear_rows(const TensorPlan& plan, int num_kv_heads, int dim);

}  // namespace kvq
