#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvq {

/// Summary of many numbers. Quantiles are interpolated linearly between the two nearest numbers (numpy's default).
struct Distribution {
  double mean = 0.0, median = 0.0, p95 = 0.0, p99 = 0.0, max = 0.0;
};
/// A field of a distribution, by its name in documents and rules.
struct DistributionPart {
  const char* name;
  double Distribution::* value;
};
/// All fields, mean first.
std::span<const DistributionPart> distribution_parts();
/// Zeros if there are no numbers, NaN if any number is NaN.
Distribution distribution_of(std::vector<float> values);

/// sum b / sum a - 1 over paired units, with a 95% interval from 2000 bootstrap samples of the units (percentiles). The
/// interval is NaN for a single unit, because all samples are the same.
struct PairedChange {
  double change = 0.0, low = 0.0, high = 0.0;
};
/// @param a, b  the same units, such as (layer, KV head), under two schemes; if sum a is 0, all is NaN
PairedChange paired_change(std::span<const double> a, std::span<const double> b, std::uint64_t seed);

/// error / energy; 0 if error is 0.
double ratio_of(double error, double energy);

struct FrontPoint {
  double x = 0.0, y = 0.0;
};
/// Indices of the points on the Pareto front, by rising x: no other point is smaller in one coordinate and not larger
/// in the other. Of equal points all are listed.
std::vector<std::size_t> pareto_front(std::span<const FrontPoint> points);

}  // namespace kvq
