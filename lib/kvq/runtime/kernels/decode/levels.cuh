#pragma once

#include <kvq/device/ptx.cuh>

/// Codebook codes as levels (LevelTable), operands of integer products: of eight codes in the nibbles of a word.
namespace kvq::decode {

/// Levels of four codes of up to 3 bits, in the low half of a word. @param table  the first eight levels
__device__ __forceinline__ unsigned four_levels(const uint4& table, unsigned codes) {
  return ptx::select_bytes(table.x, table.y, codes);
}
/// Likewise of 4 bits. @param low  bits 0 to 2 of the codes  @param high  bit 3, as bit 2 of the nibbles
__device__ __forceinline__ unsigned four_levels(const uint4& table, unsigned low, unsigned high) {
  const unsigned is_high = ptx::select_bytes(0u, ~0u, high);
  return ptx::lop3_select(is_high, ptx::select_bytes(table.z, table.w, low), ptx::select_bytes(table.x, table.y, low));
}

/// Levels of eight codes: of the nibbles 0 to 3, then 4 to 7. @param high  as above, of codes of 4 bits
template <int kBits>
__device__ __forceinline__ uint2 eight_levels(const uint4& table, unsigned low, unsigned high) {
  if constexpr (kBits == 4)
    return make_uint2(four_levels(table, low, high), four_levels(table, low >> 16, high >> 16));
  else
    return make_uint2(four_levels(table, low), four_levels(table, low >> 16));
}

}  // namespace kvq::decode
