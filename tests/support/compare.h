#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <fmt/core.h>

namespace kvq::test {

/// |a - b| / |b| over all elements (Frobenius); |a| if b is zero. Infinite if sizes differ or a number is NaN.
template <typename A, typename B>
double relative_difference(const A& a, const B& b) {
  if (std::size(a) != std::size(b)) return std::numeric_limits<double>::infinity();
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < std::size(a); ++i) {
    const auto x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  const double result = std::sqrt(size > 0.0 ? difference / size : difference);
  return std::isnan(result) ? std::numeric_limits<double>::infinity() : result;
}

/// Largest |a - b|; infinite if the sizes differ or a number is NaN.
template <typename A, typename B>
double largest_difference(const A& a, const B& b) {
  if (std::size(a) != std::size(b)) return std::numeric_limits<double>::infinity();
  double largest = 0.0;
  for (std::size_t i = 0; i < std::size(a); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= largest))
      largest = std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
  }
  return largest;
}

/// Describes the first element whose bits differ; empty if all bits are equal.
inline std::string first_bit_difference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return fmt::format("{} and {} numbers", a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = std::bit_cast<std::uint32_t>(a[i]), y = std::bit_cast<std::uint32_t>(b[i]);
    if (x != y) return fmt::format("element {}: {} ({:08x}) and {} ({:08x})", i, a[i], x, b[i], y);
  }
  return {};
}

inline std::vector<double> widened(std::span<const float> numbers) { return {numbers.begin(), numbers.end()}; }

}  // namespace kvq::test
