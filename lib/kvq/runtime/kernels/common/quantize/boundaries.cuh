#pragma once

/// Codebook codes without divisions. packing.md (c) divides each channel x by the scale d, rounds the quotient to
/// binary32 and counts the thresholds t that it reaches. Rounding keeps the order of numbers, so the quotient reaches t
/// from some x on, the boundary of t for d. With m the middle between t and the number before it, that is the first x
/// with x >= d m; or with x > d m if the last bit of t is set, because then the rounding of a tie goes to the number
/// before t.
namespace kvq::write {

/// What boundary() multiplies d by: m, or a number just above m if x must be larger than d m. That number is below
/// m (1 + 2^-50). In some unit, d m and each x near it are integers of at most 49 bits, so no x lies between d m and d
/// times that number.
/// @param t  finite
__device__ __forceinline__ double boundary_factor(float t) {
  const unsigned bits = __float_as_uint(t);
  const bool is_zero = (bits & 0x7FFFFFFFu) == 0;
  const float before = __uint_as_float(is_zero ? 0x80000001u : t > 0.0f ? bits - 1 : bits + 1);
  // Quotients from -2^128 on round to infinity.
  const double m = 0.5 * (static_cast<double>(t) + fmax(static_cast<double>(before), -0x1p128));
  return is_zero || bits % 2 == 0 ? m : m + fabs(m) * 0x1p-51;
}

/// The first x whose quotient by d reaches a threshold. @param factor  boundary_factor() of it  @param d  > 0
__device__ __forceinline__ float boundary(double factor, float d) {
  return __double2float_ru(static_cast<double>(d) * factor);
}

}  // namespace kvq::write
