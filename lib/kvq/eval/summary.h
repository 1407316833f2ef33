#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// What is left of many numbers. Quantiles lie between the two nearest ones, in proportion (numpy's default).
struct Distribution {
  double mean = 0.0, median = 0.0, p95 = 0.0, p99 = 0.0, max = 0.0;
};
/// Of no numbers: zeros.
Distribution distribution_of(std::vector<float> values);

/// sum b / sum a - 1 over paired units, with a 95% interval from 2000 bootstrap samples of the units (percentiles): NaN
/// for a single unit, of which all samples are the same.
struct PairedChange {
  double change = 0.0, low = 0.0, high = 0.0;
};
/// @param a, b  the same units, such as (layer, KV head), under two schemes; if sum a is 0, all is NaN
PairedChange paired_change(std::span<const double> a, std::span<const double> b, std::uint64_t seed);

/// error / energy; 0 of 0 is 0.
double ratio_of(double error, double energy);

/// Places of those entries beside which no other one is smaller in one coordinate and not larger in the other, by
/// rising x; equal ones are all there.
struct Point {
  double x = 0.0, y = 0.0;
};
std::vector<std::size_t> pareto_front(std::span<const Point> points);

}  // namespace kvq
