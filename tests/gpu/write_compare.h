#pragma once

#include "write_case.h"

#include <cstdint>
#include <string>

namespace kvq::test {

/// Differences between the pages of a variant and those of the codec.
struct Difference {
  std::string where;  ///< the first byte, scale or minimum that differs and must not; empty if there is none
  std::int64_t codes = 0;
  std::int64_t differing = 0;  ///< codes that differ, in rows with equal scales and minima
  std::int64_t far = 0;        ///< codes that differ by more than one
  std::int64_t inside = 0;     ///< affine codes that differ though the codec's quotient is not close to an edge
  double canceled = 1.0;       ///< largest ratio of a row's term_size() to its largest magnitude
  std::int64_t rows = 0;
  std::int64_t other_group_params = 0;  ///< rows with other scales or minima
};

/// The size that rounding errors of x_rot are relative to: the largest magnitude of x_rot, or, if the rotation is not
/// orthogonal, the largest sum_i |x_i| |A_ij|, because its terms may cancel.
double term_size(const Rotation& rotation, int head, const std::vector<float>& x, const std::vector<float>& rotated);

/// Quantizes the case with the codec and with the variant and compares pages, bytes between rows included.
Difference compare_bytes(const WriteVariant& variant, const WriteCase& c);

/// The same for rotated rows, whose codes may differ if x_rot is within the rotation's rounding error of an edge.
/// @param error  relative to term_size()
Difference compare_codes(const WriteVariant& variant, const WriteCase& c, double error);

/// Random rows, some of them hard: constant, zero, one outlier, huge, tiny, ties.
WriteCase random_case(const WriteVariant& variant, int num_tokens, int num_kv_heads, int page_size, unsigned seed,
                      bool hard);

/// The rule of a side's codes.
ScaleRule rule_of(const TileSide& side, ScaleRule symmetric);

}  // namespace kvq::test
