#pragma once

#include <kvq/codec/row_codec.h>

#include <span>
#include <vector>

namespace kvq {

/// The rows on which a decision is made: a sample of one head's keys or values, and the cost of an error. For keys the
/// cost of error e is e M e^T with M = C_Q; for values it is a_t |e|^2 with the attention energy a_t of the token.
struct FitData {
  int dim = 0;
  std::vector<float> rows = {};     ///< [n, D] unrotated
  std::vector<double> metric = {};  ///< [D, D] or empty for the identity
  std::vector<float> weights = {};  ///< [n] or empty for 1
  std::int64_t count() const { return static_cast<std::int64_t>(rows.size()) / dim; }
};

/// Rows as the coder sees them, (x - center) @ R, with the metric in the same basis. Float products; the codec's own
/// rotate_row() sums in double, which differs by rounding only.
struct RotatedData {
  int dim = 0;
  std::vector<float> rows = {};     ///< [n, D]
  std::vector<float> metric = {};   ///< [D, D] R^T M R or empty
  std::vector<float> weights = {};  ///< [n] or empty
  double shrink_weight = 1.0;       ///< how much the part of an error along the row itself counts, see clip_cost()
};
/// @param rotation  [D, D] double, row-major; empty for the identity
/// @param center    [D] or empty
RotatedData rotate(const FitData& data, std::span<const double> rotation, std::span<const float> center);

/// Cost of quantizing the rows: sum_t w_t e_t M e_t^T, in double.
double coding_cost(const RotatedData& data, const RowCodec& codec);
double coding_cost(const RotatedData& data, const Coder& coder, double clip_ratio);
/// Cost of the rows themselves, sum_t w_t x_t M x_t^T. Errors are divided by it.
double energy(const RotatedData& data);
/// Both for rows in the coordinates of the model, with products in double, because a model's scaling may give the
/// metric a condition number beyond the precision of float32.
double coding_cost(const FitData& data, const RowCodec& codec);
double energy(const FitData& data);

/// Covariance of the coder's error, (1/n) sum e^T e, [D, D] double.
std::vector<double> error_covariance(const RotatedData& data, const RowCodec& codec);

/// The cost that the search for clip ratios minimizes. Clipping shortens all rows by about the same factor: write e_t =
/// -a x_t + r_t with one a for all rows (least squares under the metric). The errors r_t of different tokens are
/// independent and average out in an output that attends to many tokens; the parts -a x_t do not average out. So the
/// cost is sum w r M r^T + shrink_weight * a^2 sum w x M x^T.
double clip_cost(const RotatedData& data, const RowCodec& codec);

}  // namespace kvq
