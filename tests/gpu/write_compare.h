#pragma once

#include "write_case.h"

#include <cstdint>
#include <string>

namespace kvq::test {

/// How what a variant wrote differs from what the codec says.
struct Difference {
  std::string where;  ///< the first byte or number that must not differ and does; empty if none
  std::int64_t codes = 0;
  std::int64_t differing = 0;  ///< codes; of rows with equal numbers
  std::int64_t far = 0;        ///< differing by more than one
  std::int64_t inside = 0;     ///< affine codes that differ though the codec's quotient is not close to an edge
  double cancelled = 1.0;      ///< of a row the size of its terms over its own, at most
  std::int64_t rows = 0;
  std::int64_t other_numbers = 0;  ///< rows with other scales or minima
};

/// What rounding errors of x_rot are relative to: its largest magnitude, or if the rotation is not orthogonal the
/// largest sum_i |x_i| |A_ij|, the size of its terms, which may cancel.
double term_size(const Rotation& rotation, int head, const std::vector<float>& x, const std::vector<float>& rotated);

/// Codes the case with the codec and with the variant and compares pages, those between rows included.
Difference compare_bytes(const WriteVariant& variant, const WriteCase& c);

/// The same of rotated rows, which may differ where x_rot is within the rotation's rounding error of an edge.
/// @param error  relative to term_size()
Difference compare_codes(const WriteVariant& variant, const WriteCase& c, double error);

/// Random rows, some of them hard: constant, zero, one outlier, huge, tiny, ties.
WriteCase random_case(const WriteVariant& variant, int num_tokens, int num_kv_heads, int page_size, unsigned seed,
                      bool hard);

/// The rule of a side's codes.
ScaleRule rule_of(const TileSide& side, ScaleRule symmetric);

}  // namespace kvq::test
