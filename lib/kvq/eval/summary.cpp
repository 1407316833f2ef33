#include <kvq/core/error.h>
#include <kvq/core/random.h>
#include <kvq/eval/summary.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvq {

namespace {

template <typename T>
double quantile(const std::vector<T>& sorted, double q) {
  const double place = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  const double part = place - static_cast<double>(below);
  return static_cast<double>(sorted[below]) +
         part * (static_cast<double>(sorted[above]) - static_cast<double>(sorted[below]));
}

}  // namespace

std::span<const DistributionPart> distribution_parts() {
  static constexpr DistributionPart kParts[] = {{"mean", &Distribution::mean},
                                                {"median", &Distribution::median},
                                                {"p95", &Distribution::p95},
                                                {"p99", &Distribution::p99},
                                                {"max", &Distribution::max}};
  return kParts;
}

Distribution distribution_of(std::vector<float> values) {
  if (values.empty()) return {};
  // NaN has no order, so that values with NaN cannot be sorted and have no quantiles.
  if (std::any_of(values.begin(), values.end(), [](float value) { return std::isnan(value); })) {
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    return {kNone, kNone, kNone, kNone, kNone};
  }
  std::sort(values.begin(), values.end());
  double sum = 0.0;
  for (const float value : values) sum += static_cast<double>(value);
  return {
      .mean = sum / static_cast<double>(values.size()),
      .median = quantile(values, 0.5),
      .p95 = quantile(values, 0.95),
      .p99 = quantile(values, 0.99),
      .max = static_cast<double>(values.back()),
  };
}

PairedChange paired_change(std::span<const double> a, std::span<const double> b, std::uint64_t seed) {
  constexpr int kSamples = 2000;
  KVQ_ASSERT(a.size() == b.size() && !a.empty());
  const auto change = [](double sum_a, double sum_b) {
    return sum_a != 0.0 ? sum_b / sum_a - 1.0 : std::numeric_limits<double>::quiet_NaN();
  };
  PairedChange result;
  result.change = change(std::accumulate(a.begin(), a.end(), 0.0), std::accumulate(b.begin(), b.end(), 0.0));
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (std::isnan(result.change) || a.size() == 1) return {result.change, kNone, kNone};
  RandomStream random(seed, RandomStream::Purpose::bootstrap);
  std::vector<double> samples;
  for (int s = 0; s < kSamples; ++s) {
    double sum_a = 0.0, sum_b = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const auto unit = static_cast<std::size_t>((std::uint64_t{random.next_u32()} * a.size()) >> 32);
      sum_a += a[unit];
      sum_b += b[unit];
    }
    if (sum_a != 0.0) samples.push_back(change(sum_a, sum_b));
  }
  if (samples.empty()) return {result.change, kNone, kNone};
  std::sort(samples.begin(), samples.end());
  result.low = quantile(samples, 0.025);
  result.high = quantile(samples, 0.975);
  return result;
}

double ratio_of(double error, double energy) { return error == 0.0 ? 0.0 : error / energy; }

std::vector<std::size_t> pareto_front(std::span<const FrontPoint> points) {
  std::vector<std::size_t> order(points.size()), front;
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) {
    if (points[i].x != points[j].x) return points[i].x < points[j].x;
    return points[i].y != points[j].y ? points[i].y < points[j].y : i < j;
  });
  for (const std::size_t i : order)
    if (front.empty() || points[i].y < points[front.back()].y ||
        (points[i].y == points[front.back()].y && points[i].x == points[front.back()].x))
      front.push_back(i);
  return front;
}

}  // namespace kvq
