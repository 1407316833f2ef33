#include <kvq/codec/codec.h>
#include <kvq/core/error.h>

#include <algorithm>
#include <cmath>

namespace kvq {

void attend(std::span<const float> q, std::span<const float> k, std::span<const float> v, int dim, int v_dim,
            double scale, int window, std::span<double> out) {
  const auto d = static_cast<std::size_t>(dim);
  const auto dv = static_cast<std::size_t>(v_dim);
  const std::size_t tokens = q.size() / d;
  KVQ_ASSERT(k.size() == tokens * d && v.size() == tokens * dv && out.size() == tokens * dv);
  std::vector<double> weights(tokens);
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::size_t first =
        window > 0 && i + 1 > static_cast<std::size_t>(window) ? i + 1 - static_cast<std::size_t>(window) : 0;
    double largest = -HUGE_VAL;
    for (std::size_t t = first; t <= i; ++t) {
      double dot = 0.0;
      for (std::size_t j = 0; j < d; ++j) dot += double{q[i * d + j]} * double{k[t * d + j]};
      weights[t] = scale * dot;
      largest = std::max(largest, weights[t]);
    }
    double sum = 0.0;
    for (std::size_t t = first; t <= i; ++t) sum += weights[t] = std::exp(weights[t] - largest);
    std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(i * dv), dv, 0.0);
    for (std::size_t t = first; t <= i; ++t)
      for (std::size_t j = 0; j < dv; ++j) out[i * dv + j] += weights[t] / sum * double{v[t * dv + j]};
  }
}

}  // namespace kvq
