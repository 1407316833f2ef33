#pragma once

#include <kvq/core/side.h>
#include <kvq/plan/layer_plan.h>

#include <vector>

namespace kvq {

/// Theta of one head's linear rows (plan/linear_rows.h): x_hat_rot = s Theta b, with the stored scale s and the bits b
/// of a row in bit tiles, each +1/2 or -1/2. Gains are in it. Channels of width 0 are rows of zeros, bits behind the
/// head's row columns of zeros.
/// @param plan      is_linear()
/// @param side      the order of bits: key_bit() or value_bit()
/// @param row_bits  B, 32 times the words of a row of the layer
/// @return          [D, B]
/// @throws          Error{internal} for other rows, and for rows of more bits
std::vector<double> linear_basis(const TensorPlan& plan, int kv_head, int dim, Side side, int row_bits);

}  // namespace kvq
