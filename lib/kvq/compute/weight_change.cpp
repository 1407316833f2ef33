#include <kvq/compute/row_ops.h>
#include <kvq/compute/vector_lanes.h>
#include <kvq/compute/weight_change.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace kvq {

namespace {

using namespace lanes;

constexpr std::int64_t kPiece = 1024;  // summed in float lanes, then in double
constexpr float kLargestChange = 60.0f;

/// Calls step(at, count) for the pieces of a row. Returns the sum of the results.
template <typename Step>
double over_pieces(std::int64_t count, const Step& step) {
  double total = 0.0;
  for (std::int64_t t = 0; t < count; t += kPiece) total += step(t, std::min(kPiece, count - t));
  return total;
}

/// Calls term(value, added) for each vector position; `value` holds copies of one vector of each row. If `out` is not
/// null, the last of them is stored there. Beyond `count` the rows are padded with zeros, the last row with `fill`.
/// Returns the sum of `added`.
template <int kWidth, std::size_t kRows, typename Term>
KVQ_INLINE float sweep(const std::array<const float*, kRows>& rows, float* out, std::int64_t count, const Term& term,
                       float fill = 0.0f) {
  using V = Vector<kWidth>;
  typename V::Floats total[V::kCount], value[kRows], added;
  for (auto& sum : total) sum = typename V::Floats{};
  const auto step = [&](const std::array<const float*, kRows>& at, float* to) __attribute__((always_inline)) {
    for (int i = 0; i < V::kCount; ++i) {
      for (std::size_t r = 0; r < kRows; ++r) load(at[r] + i * kWidth, value[r]);
      term(value, added);
      total[i] = total[i] + added;
      if (to != nullptr) store(value[kRows - 1], to + i * kWidth);
    }
  };
  std::int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes) {
    std::array<const float*, kRows> at;
    for (std::size_t r = 0; r < kRows; ++r) at[r] = rows[r] + t;
    step(at, out != nullptr ? out + t : nullptr);
  }
  if (t < count) {
    float tail[kRows][kLanes] = {}, result[kLanes];
    std::fill_n(tail[kRows - 1], kLanes, fill);
    std::array<const float*, kRows> at;
    for (std::size_t r = 0; r < kRows; ++r) {
      std::memcpy(tail[r], rows[r] + t, static_cast<std::size_t>(count - t) * sizeof(float));
      at[r] = tail[r];
    }
    step(at, out != nullptr ? result : nullptr);
    if (out != nullptr) std::memcpy(out + t, result, static_cast<std::size_t>(count - t) * sizeof(float));
  }
  float lanes[kLanes], sum = 0.0f;
  std::memcpy(lanes, total, sizeof lanes);
  for (const float lane : lanes) sum += lane;
  return sum;
}

template <int kWidth>
KVQ_INLINE float plain_sum(const float* row, std::int64_t count) {
  using Floats = typename Vector<kWidth>::Floats;
  return sweep<kWidth, 1>({row}, nullptr, count,
                          [](Floats* value, Floats& added) __attribute__((always_inline)) { added = value[0]; });
}

template <int kWidth>
KVQ_INLINE float products(const float* a, const float* b, std::int64_t count) {
  using Floats = typename Vector<kWidth>::Floats;
  return sweep<kWidth, 2>({a, b}, nullptr, count, [](Floats* value, Floats& added) __attribute__((always_inline)) {
    added = value[0] * value[1];
  });
}

/// delta becomes u = exp(x) - 1 for x = delta - mean; returns sum p (u - x). For |x| < 1, u - x is computed from its
/// series, otherwise as exp(x) - 1 - x: both keep its digits.
template <int kWidth>
KVQ_INLINE float bend(const float* p, float* delta, std::int64_t count, float mean) {
  using Floats = typename Vector<kWidth>::Floats;
  return sweep<kWidth, 2>(
      {p, delta}, delta, count,
      [mean](Floats* value, Floats& added) __attribute__((always_inline)) {
        const Floats x = value[1] - mean;
        Floats series = Floats{} + 2.5052108e-8f;  // 1 / 11!
        for (const float coefficient : {2.7557319e-7f, 2.7557319e-6f, 2.4801587e-5f, 1.9841270e-4f, 1.3888889e-3f,
                                        8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f})
          series = series * x + coefficient;
        const Floats near = series * x * x;
        Floats power = x;
        exp_nonpositive<kWidth>(power);
        const Floats far = (power - 1.0f) - x;
        const Floats magnitude = x < 0.0f ? -x : x;
        const Floats bent = magnitude < 1.0f ? near : far;
        added = value[0] * bent;
        value[1] = magnitude < 1.0f ? x + near : power - 1.0f;
      },
      mean);  // x = 0 behind the end
}

/// delta[t] = p[t] (delta[t] - h) factor
template <int kWidth>
KVQ_INLINE void weigh(const float* p, float* delta, std::int64_t count, float h, float factor) {
  using Floats = typename Vector<kWidth>::Floats;
  sweep<kWidth, 2>({p, delta}, delta, count, [h, factor](Floats* value, Floats& added) __attribute__((always_inline)) {
    value[1] = value[0] * (value[1] - h) * factor;
    added = Floats{};
  });
}

struct Operations {
  float (*sum)(const float*, std::int64_t);
  float (*products)(const float*, const float*, std::int64_t);
  float (*bend)(const float*, float*, std::int64_t, float);
  void (*weigh)(const float*, float*, std::int64_t, float, float);
};

// NOLINTBEGIN(bugprone-macro-parentheses): `target` is an attribute.
#define KVQ_DEFINE(width, target)                                                                                    \
  target float sum_##width(const float* row, std::int64_t n) { return plain_sum<width>(row, n); }                    \
  target float products_##width(const float* a, const float* b, std::int64_t n) { return products<width>(a, b, n); } \
  target float bend_##width(const float* p, float* delta, std::int64_t n, float mean) {                              \
    return bend<width>(p, delta, n, mean);                                                                           \
  }                                                                                                                  \
  target void weigh_##width(const float* p, float* delta, std::int64_t n, float h, float factor) {                   \
    weigh<width>(p, delta, n, h, factor);                                                                            \
  }

KVQ_DEFINE(4, )
#ifdef KVQ_X86
KVQ_DEFINE(8, __attribute__((target("avx2"))))
KVQ_DEFINE(16, __attribute__((target("avx512f"))))
#endif
#undef KVQ_DEFINE
// NOLINTEND(bugprone-macro-parentheses)

const Operations& operations() {
  static const Operations chosen = [] {
#ifdef KVQ_X86
    if (__builtin_cpu_supports("avx512f")) return Operations{sum_16, products_16, bend_16, weigh_16};
    if (__builtin_cpu_supports("avx2")) return Operations{sum_8, products_8, bend_8, weigh_8};
#endif
    return Operations{sum_4, products_4, bend_4, weigh_4};
  }();
  return chosen;
}

double log_sum_exp(const std::vector<double>& logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const double logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

double products_slowly(const float* a, const float* b, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t t = 0; t < count; ++t) sum += double{a[t]} * double{b[t]};
  return sum;
}

/// The same for changes of any size, in double from the logits.
double change_weights_slowly(const float* logits, float* delta, std::int64_t count) {
  const auto n = static_cast<std::size_t>(count);
  std::vector<double> before(logits, logits + n), after(n);
  for (std::size_t t = 0; t < n; ++t) after[t] = before[t] + double{delta[t]};
  const double z_before = log_sum_exp(before), z_after = log_sum_exp(after);
  double divergence = 0.0;
  for (std::size_t t = 0; t < n; ++t) {
    const double p = std::exp(before[t] - z_before);
    divergence += p * ((before[t] - z_before) - (after[t] - z_after));
    delta[t] = static_cast<float>(std::exp(after[t] - z_after) - p);
  }
  return std::max(0.0, divergence);
}

}  // namespace

double sum_of(const float* row, std::int64_t count) {
  return over_pieces(count, [&](std::int64_t t, std::int64_t n) { return double{operations().sum(row + t, n)}; });
}

double sum_of_squares(const float* row, std::int64_t count) {
  constexpr float kLeast = 1e-25f;  // below, some squares may be too small for a float
  return over_pieces(count, [&](std::int64_t t, std::int64_t n) {
    const float sum = operations().products(row + t, row + t, n);
    return sum >= kLeast && std::isfinite(sum) ? double{sum} : products_slowly(row + t, row + t, n);
  });
}

double dot_product(const float* a, const float* b, std::int64_t count) {
  return over_pieces(count, [&](std::int64_t t, std::int64_t n) {
    const float sum = operations().products(a + t, b + t, n);
    return std::isfinite(sum) ? double{sum} : products_slowly(a + t, b + t, n);
  });
}

double change_weights(const float* p, const float* logits, float* delta, std::int64_t count) {
  if (count == 0) return 0.0;
  const double total = sum_of(p, count), exact_mean = dot_product(p, delta, count) / total;
  const auto mean = static_cast<float>(exact_mean);
  if (!(row_ops::largest(delta, count) - mean < kLargestChange)) return change_weights_slowly(logits, delta, count);
  const double bent = over_pieces(
      count, [&](std::int64_t t, std::int64_t n) { return double{operations().bend(p + t, delta + t, n, mean)}; });
  // Z = 1 + sum p u = 1 + h, and KL = log Z - sum p x, where sum p x = h - sum p (u - x) is not exactly 0, because the
  // mean is rounded.
  const double h = dot_product(p, delta, count) / total;
  const double divergence = h < 1.0 ? bent / total + (std::log1p(h) - h) : std::log1p(h) - (exact_mean - double{mean});
  const auto factor = static_cast<float>(1.0 / (total * (1.0 + h)));
  over_pieces(count, [&](std::int64_t t, std::int64_t n) {
    operations().weigh(p + t, delta + t, n, static_cast<float>(h), factor);
    return 0.0;
  });
  return std::max(0.0, divergence);
}

}  // namespace kvq
