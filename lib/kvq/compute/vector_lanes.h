#pragma once

#include <cstdint>
#include <cstring>

// Vector types of g++ and clang, as wide as the machine's vectors. All loops keep sixteen lanes (four vectors of 4, two
// of 8, one of 16) and use no fused multiply-add, so that every width gives the same bits.
#define KVQ_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__)
#define KVQ_X86 1
#endif

/// For the sources of compute/ that sweep over rows of S.
namespace kvq::lanes {

constexpr std::int64_t kLanes = 16;

template <int kWidth>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * kWidth)));
  typedef std::int32_t Ints __attribute__((vector_size(4 * kWidth)));
  static constexpr int kCount = static_cast<int>(kLanes) / kWidth;  // vectors that make sixteen lanes
};

// By reference: passing such a type by value has a different calling convention on every target.
template <typename Floats>
KVQ_INLINE void load(const float* from, Floats& to) {
  std::memcpy(&to, from, sizeof to);
}
template <typename Floats>
KVQ_INLINE void store(const Floats& from, float* to) {
  std::memcpy(to, &from, sizeof from);
}

/// exp(x) for x <= 0: 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2. n ln 2 is subtracted in two pieces (Cody
/// and Waite); exp(r) by its series to the sixth power, remainder 1.2e-7.
template <int kWidth>
KVQ_INLINE void exp_nonpositive(typename Vector<kWidth>::Floats& x) {
  using Floats = typename Vector<kWidth>::Floats;
  const Floats lowest = Floats{} - 87.0f;
  const Floats clamped = x < lowest ? lowest : x;
  const Floats shifted =
      clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits of the sum are round(x / ln 2)
  const Floats n = shifted - 12582912.0f;
  const Floats r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = Floats{} + 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  typename Vector<kWidth>::Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  x = x < lowest ? Floats{} : p * power;
}

}  // namespace kvq::lanes
