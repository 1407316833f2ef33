#include <kvq/compute/row_ops.h>
#include <kvq/compute/vector_lanes.h>

#include <algorithm>
#include <cstring>

namespace kvq::row_ops {

namespace {

using namespace lanes;

template <int kWidth>
KVQ_INLINE float largest_of(const float* row, std::int64_t count) {
  using V = Vector<kWidth>;
  typename V::Floats best[V::kCount], x;
  for (auto& b : best) b = typename V::Floats{} + row[0];
  std::int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes)
    for (int i = 0; i < V::kCount; ++i) {
      load(row + t + i * kWidth, x);
      best[i] = best[i] < x ? x : best[i];
    }
  float result = row[0];
  for (const auto& b : best)
    for (int j = 0; j < kWidth; ++j) result = std::max(result, b[j]);
  for (; t < count; ++t) result = std::max(result, row[t]);
  return result;
}

template <int kWidth>
KVQ_INLINE float exponentiate_row(float* row, std::int64_t count, float top) {
  using V = Vector<kWidth>;
  typename V::Floats total[V::kCount], x;
  for (auto& sum : total) sum = typename V::Floats{};
  const auto step = [&](float* at) __attribute__((always_inline)) {
    for (int i = 0; i < V::kCount; ++i) {
      load(at + i * kWidth, x);
      x = x - top;
      exp_nonpositive<kWidth>(x);
      store(x, at + i * kWidth);
      total[i] = total[i] + x;
    }
  };
  std::int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes) step(row + t);
  if (t < count) {
    float tail[kLanes];
    std::fill(tail, tail + kLanes, -1e30f);  // exponential 0: adds nothing
    std::memcpy(tail, row + t, static_cast<std::size_t>(count - t) * sizeof(float));
    step(tail);
    std::memcpy(row + t, tail, static_cast<std::size_t>(count - t) * sizeof(float));
  }
  float lanes[kLanes], sum = 0.0f;
  std::memcpy(lanes, total, sizeof lanes);
  for (const float lane : lanes) sum += lane;
  return sum;
}

/// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), which overflows nowhere.
template <int kWidth>
KVQ_INLINE void soft_cap_row(float* row, std::int64_t count, float cap) {
  using V = Vector<kWidth>;
  const float factor = -2.0f / cap;
  const auto step = [&](float* at) __attribute__((always_inline)) {
    typename V::Floats x, e;
    for (int i = 0; i < V::kCount; ++i) {
      load(at + i * kWidth, x);
      e = (x < 0.0f ? -x : x) * factor;
      exp_nonpositive<kWidth>(e);
      e = cap * (1.0f - e) / (1.0f + e);
      x = x < 0.0f ? -e : e;
      store(x, at + i * kWidth);
    }
  };
  std::int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes) step(row + t);
  if (t == count) return;
  float tail[kLanes] = {};
  std::memcpy(tail, row + t, static_cast<std::size_t>(count - t) * sizeof(float));
  step(tail);
  std::memcpy(row + t, tail, static_cast<std::size_t>(count - t) * sizeof(float));
}

template <int kWidth>
KVQ_INLINE void add_squares_of(const float* row, std::int64_t count, float factor, float* columns) {
  typename Vector<kWidth>::Floats x, sum;
  std::int64_t t = 0;
  for (; t + kWidth <= count; t += kWidth) {
    load(row + t, x);
    load(columns + t, sum);
    x = x * factor;
    sum = sum + x * x;
    store(sum, columns + t);
  }
  for (; t < count; ++t) columns[t] += (factor * row[t]) * (factor * row[t]);
}

struct Operations {
  float (*largest)(const float*, std::int64_t);
  float (*exponentiate)(float*, std::int64_t, float);
  void (*soft_cap)(float*, std::int64_t, float);
  void (*add_squares)(const float*, std::int64_t, float, float*);
};

float largest_4(const float* row, std::int64_t count) { return largest_of<4>(row, count); }
float exponentiate_4(float* row, std::int64_t count, float top) { return exponentiate_row<4>(row, count, top); }
void soft_cap_4(float* row, std::int64_t count, float cap) { soft_cap_row<4>(row, count, cap); }
void add_squares_4(const float* row, std::int64_t count, float factor, float* columns) {
  add_squares_of<4>(row, count, factor, columns);
}

#ifdef KVQ_X86
__attribute__((target("avx2"))) float largest_8(const float* row, std::int64_t count) {
  return largest_of<8>(row, count);
}
__attribute__((target("avx2"))) float exponentiate_8(float* row, std::int64_t count, float top) {
  return exponentiate_row<8>(row, count, top);
}
__attribute__((target("avx2"))) void soft_cap_8(float* row, std::int64_t count, float cap) {
  soft_cap_row<8>(row, count, cap);
}
__attribute__((target("avx2"))) void add_squares_8(const float* row, std::int64_t count, float factor, float* columns) {
  add_squares_of<8>(row, count, factor, columns);
}
__attribute__((target("avx512f"))) float largest_16(const float* row, std::int64_t count) {
  return largest_of<16>(row, count);
}
__attribute__((target("avx512f"))) float exponentiate_16(float* row, std::int64_t count, float top) {
  return exponentiate_row<16>(row, count, top);
}
__attribute__((target("avx512f"))) void soft_cap_16(float* row, std::int64_t count, float cap) {
  soft_cap_row<16>(row, count, cap);
}
__attribute__((target("avx512f"))) void add_squares_16(const float* row, std::int64_t count, float factor,
                                                       float* columns) {
  add_squares_of<16>(row, count, factor, columns);
}
#endif

const Operations& operations() {
  static const Operations chosen = [] {
#ifdef KVQ_X86
    if (__builtin_cpu_supports("avx512f")) return Operations{largest_16, exponentiate_16, soft_cap_16, add_squares_16};
    if (__builtin_cpu_supports("avx2")) return Operations{largest_8, exponentiate_8, soft_cap_8, add_squares_8};
#endif
    return Operations{largest_4, exponentiate_4, soft_cap_4, add_squares_4};
  }();
  return chosen;
}

}  // namespace

float largest(const float* row, std::int64_t count) { return operations().largest(row, count); }
float exponentiate(float* row, std::int64_t count, float top) { return operations().exponentiate(row, count, top); }
void soft_cap(float* row, std::int64_t count, float cap) { operations().soft_cap(row, count, cap); }
void add_squares(const float* row, std::int64_t count, float factor, float* columns) {
  operations().add_squares(row, count, factor, columns);
}

}  // namespace kvq::row_ops
