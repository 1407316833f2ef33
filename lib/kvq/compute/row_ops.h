#pragma once

#include <cstdint>

/// Loops over a row of S between the two matrix products, written for wide vectors. All use 16 lanes on every machine,
/// so that every build adds in the same order.
namespace kvq::row_ops {

/// Largest of `count` >= 1 values.
float largest(const float* row, std::int64_t count);

/// row[t] = exp(row[t] - top) in place for values <= top; returns their sum. Relative error below 2.5e-7; exactly 0
/// below top - 87. The sum is exact to a few ulp for rows up to some thousands of entries.
float exponentiate(float* row, std::int64_t count, float top);

/// row[t] = cap tanh(row[t] / cap) in place; the error is below 2e-7 cap. cap > 0.
void soft_cap(float* row, std::int64_t count, float cap);

/// columns[t] += (factor * row[t])^2.
void add_squares(const float* row, std::int64_t count, float factor, float* columns);

}  // namespace kvq::row_ops
