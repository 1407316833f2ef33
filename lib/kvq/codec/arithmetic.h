#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

/// Arithmetic of packing.md that several coders share. Every operation is one binary32 rounding.
namespace kvq::arithmetic {

constexpr int kLargestGroup = 1024;

/// tree(y): pads the sequence with zeros to a power of two, then adds neighbors in pairs until one number is left.
inline float tree_sum(std::array<float, kLargestGroup>& values, std::size_t count) {
  std::size_t width = 1;
  while (width < count) width *= 2;
  std::fill(values.begin() + static_cast<std::ptrdiff_t>(count), values.begin() + static_cast<std::ptrdiff_t>(width),
            0.0f);
  for (; width > 1; width /= 2)
    for (std::size_t i = 0; i < width / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  return values[0];
}

/// tree(x y)
inline float tree_dot(std::span<const float> x, std::span<const float> y) {
  std::array<float, kLargestGroup> products;
  for (std::size_t i = 0; i < x.size(); ++i) products[i] = x[i] * y[i];
  return tree_sum(products, x.size());
}

/// E = tree(x x)
inline float energy(std::span<const float> x) { return tree_dot(x, x); }

}  // namespace kvq::arithmetic
