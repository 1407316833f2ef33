#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kvq {

/// A floating-point format of a few bits, without infinities, whose largest numbers stand for all that is larger.
struct SmallFloat {
  int mantissa_bits = 0;
  int least_exponent = 0;  ///< of a normal number; below it the step between numbers stays the same
  float largest = 0.0f;
};
/// 8 bits: sign, 4 of exponent, 3 of mantissa (OCP e4m3, "e4m3fn").
inline constexpr SmallFloat kE4m3{.mantissa_bits = 3, .least_exponent = -6, .largest = 448.0f};
/// 4 bits: sign, 2 of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
inline constexpr SmallFloat kE2m1{.mantissa_bits = 1, .least_exponent = 0, .largest = 6.0f};

/// The number of the format nearest to x, of two equally near ones that with an even mantissa; beyond the largest
/// number the largest number. Signs stay, also of zero.
/// @param x  finite
inline float round_to(const SmallFloat& format, float x) {
  const float size = std::abs(x);
  if (size >= format.largest) return std::copysign(format.largest, x);
  const int exponent = size > 0.0f ? std::max(std::ilogb(size), format.least_exponent) : format.least_exponent;
  // Scaling by a power of two is exact, and nearbyint rounds halves to even.
  const float steps = std::nearbyint(std::ldexp(size, format.mantissa_bits - exponent));
  return std::copysign(std::ldexp(steps, exponent - format.mantissa_bits), x);
}

}  // namespace kvq
