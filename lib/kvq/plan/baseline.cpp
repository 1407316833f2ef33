#include <kvq/plan/baseline.h>

#include <algorithm>

namespace kvq {

namespace {

constexpr int kLeastGroup = 16, kMostBits = 8;

/// Whether `a` is the better baseline for rows of `wanted` bytes.
bool is_nearer(const UniformCoder& a, const UniformCoder& b, int dim, std::int64_t wanted) {
  const std::int64_t of_a = row_bytes(Coder{a}, dim), of_b = row_bytes(Coder{b}, dim);
  if ((of_a >= wanted) != (of_b >= wanted)) return of_a >= wanted;
  if (of_a != of_b) return of_a >= wanted ? of_a < of_b : of_a > of_b;
  return a.bits > b.bits;
}

}  // namespace

UniformCoder plain_baseline(int row_bytes, int dim) {
  UniformCoder best{.bits = 1, .group_size = dim};
  for (int bits = 1; bits <= kMostBits; ++bits)
    for (int group = std::min(kLeastGroup, dim); group <= dim; ++group) {
      const UniformCoder coder{.bits = bits, .group_size = group};
      if (dim % group == 0 && is_nearer(coder, best, dim, row_bytes)) best = coder;
    }
  return best;
}

}  // namespace kvq
