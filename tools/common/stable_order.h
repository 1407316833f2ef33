#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

namespace kvq {

/// A stable sort. clang refuses std::stable_sort with libstdc++ 12, which calls a function that C++17 deprecates.
template <typename T, typename Less>
void sort_stably(std::vector<T>& values, const Less& less) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (less(values[a], values[b])) return true;
    return !less(values[b], values[a]) && a < b;
  });
  std::vector<T> sorted;
  sorted.reserve(values.size());
  for (const std::size_t i : order) sorted.push_back(std::move(values[i]));
  values = std::move(sorted);
}

}  // namespace kvq
