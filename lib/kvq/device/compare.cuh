#pragma once

namespace kvq::ptx {

/// 1 if x >= y, else 0. (Written in C++, many comparisons in a row become predicates that the compiler keeps in bits of
/// registers, with two operations for each.)
__device__ __forceinline__ float at_least(float x, float y) {
  float z;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace kvq::ptx
