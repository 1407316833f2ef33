#pragma once

#include <kvq/runtime/kernels/quantize_write/params.h>
#include <kvq/runtime/kernels/quantize_write/rows.cuh>

/// Loading, centring and rotating. A Hadamard transform works on the bits of the channel's number. Bits 0, 1 (of e) and
/// 3, 4 (t) are one product of tensor cores with a matrix of +1, -1 (and 0, where the block does not reach): exact
/// products, summed in float32. Bits 2 and 5 and above are additions within the lane.
namespace kvq::write {

/// One element of the 16 x 16 matrix over bits 0, 1, 3, 4 of the channel; rows and columns are numbered as the
/// fragments are: i < 8: t = i / 2, e = i mod 2; else t = (i - 8) / 2, e = 2 + i mod 2.
template <typename T>
__device__ __forceinline__ unsigned matrix_element(int row, int column, int order) {
  const auto channel = [](int i) { return (i % 8 / 2) * 8 + (i / 8) * 2 + i % 2; };
  const int a = channel(row), b = channel(column), inside = order - 1;
  if ((a ^ b) & ~inside) return 0;  // different blocks
  return Pair<T>::kOne | (__popc(a & b & inside) & 1 ? 0x8000u : 0u);
}

/// Loads the warp's rows and transforms them.
template <typename Side, typename T>
__device__ __forceinline__ void load_rotated(const WriteSide& side, const WriteParams& p, int first_token, int head,
                                             int lane, Rows<Side>& rows) {
  constexpr int kSteps = Rows<Side>::kSteps, kDim = Side::kHeadDim;
  const int g = lane >> 2, t = lane & 3, order = side.order;
  uint4 raw[2][kSteps];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = min(first_token + g + 8 * r, p.num_tokens - 1);
    const uint4* from =
        reinterpret_cast<const uint4*>(static_cast<const T*>(side.x) + token * side.token_stride + head * kDim) + t;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) raw[r][j] = __ldg(from + 4 * j);
  }
  if (order <= 1 || side.center) {
    const float* center = side.center ? side.center + head * kDim : nullptr;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const unsigned words[4] = {raw[r][j].x, raw[r][j].y, raw[r][j].z, raw[r][j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = Pair<T>::to_float(words[i]);
          const int channel = 32 * j + 8 * t + 2 * i;
          rows.x[r][j][2 * i] = center ? two.x - center[channel] : two.x;
          rows.x[r][j][2 * i + 1] = center ? two.y - center[channel + 1] : two.y;
        }
      }
    if (order <= 1) return;
    // Centred rows have more digits than the tensor cores take: shuffles and additions instead.
    const std::int8_t* signs = side.signs ? side.signs + (side.per_head ? head * kDim : 0) : nullptr;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& x = rows.x[r][j][e];
          if (signs && signs[32 * j + 8 * t + e] < 0) x = -x;
        }
#pragma unroll
    for (int bit = 0; bit < 5; ++bit) {
      if (bit == 2 || order <= 1 << bit) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          if (bit < 2) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
              if (!(e >> bit & 1)) {
                const float a = rows.x[r][j][e], b = rows.x[r][j][e | 1 << bit];
                rows.x[r][j][e] = a + b, rows.x[r][j][e | 1 << bit] = a - b;
              }
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float mine = rows.x[r][j][e], other = __shfl_xor_sync(kAll, mine, 1 << (bit - 3));
              rows.x[r][j][e] = t >> (bit - 3) & 1 ? other - mine : mine + other;
            }
          }
        }
    }
  } else {
    if (side.signs) {
      const std::int8_t* signs = side.signs + (side.per_head ? head * kDim : 0) + 8 * t;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const uint2 eight = __ldg(reinterpret_cast<const uint2*>(signs + 32 * j));
        const auto flips = [](unsigned bytes, int i) {
          return (bytes >> (16 * i + 7) & 1) << 15 | (bytes >> (16 * i + 15) & 1) << 31;
        };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          raw[r][j].x ^= flips(eight.x, 0), raw[r][j].y ^= flips(eight.x, 1);
          raw[r][j].z ^= flips(eight.y, 0), raw[r][j].w ^= flips(eight.y, 1);
        }
      }
    }
    unsigned b[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 8 * half + 2 * t, column = 8 * n + g;
        b[n][half] = matrix_element<T>(row, column, order) | matrix_element<T>(row + 1, column, order) << 16;
      }
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float c[4] = {};
          if (half == 0)
            Pair<T>::mma(c, raw[0][j].x, raw[1][j].x, raw[0][j].y, raw[1][j].y, b[n][0], b[n][1]);
          else
            Pair<T>::mma(c, raw[0][j].z, raw[1][j].z, raw[0][j].w, raw[1][j].w, b[n][0], b[n][1]);
          rows.x[0][j][4 * half + 2 * n] = c[0], rows.x[0][j][4 * half + 2 * n + 1] = c[1];
          rows.x[1][j][4 * half + 2 * n] = c[2], rows.x[1][j][4 * half + 2 * n + 1] = c[3];
        }
  }
  // Bit 2, then the steps' bits.
  const float scale = rsqrtf(static_cast<float>(order));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (order >= 8) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float a = rows.x[r][j][e], b = rows.x[r][j][e + 4];
          rows.x[r][j][e] = a + b, rows.x[r][j][e + 4] = a - b;
        }
    }
#pragma unroll
    for (int bit = 1; bit < kSteps; bit *= 2) {
      if (order < 64 * bit || kSteps % (2 * bit) != 0) continue;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (j & bit) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float a = rows.x[r][j][e], b = rows.x[r][j + bit][e];
          rows.x[r][j][e] = a + b, rows.x[r][j + bit][e] = a - b;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.x[r][j][e] *= scale;
  }
}

}  // namespace kvq::write
