#pragma once

namespace kvq {

constexpr unsigned kAll = ~0u;  ///< mask of all lanes of a warp
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kMinusInf = -__builtin_huge_valf();
constexpr float kNaN = __builtin_nanf("");

}  // namespace kvq
