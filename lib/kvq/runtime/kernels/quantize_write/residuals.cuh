#pragma once

#include <kvq/runtime/kernels/common/generic_tiles.cuh>
#include <kvq/runtime/kernels/quantize_write/rotate.cuh>

/// Rotates residuals of centroids by the products of rotate.cuh. A residual is a float32 number, which is split in
/// three bfloat16 numbers without a rest: products are exact, as those of 16-bit rows are.
namespace kvq::write {

/// The warp's rows minus their centroids, whose indices the rows' pages have, times signs of channels. Rows without a
/// page are residuals of the first centroid, which nothing reads.
/// @param raw    as load_rows() returns them
/// @param slots  lane i has page * page_size + slot of token i, i = 0..15; negative: not stored
template <typename Side, typename T, typename TileOf>
__device__ __forceinline__ void load_residuals(const WriteSide& side, const uint4 (&raw)[2][Side::kHeadDim / 32],
                                               std::int64_t slots, TileOf tile_of, int head, int lane,
                                               Rows<Side>& rows) {
  constexpr int kDim = Side::kHeadDim;
  const int t = lane & 3, entry = (side.per_head ? head * kDim : 0) + 8 * t;
  std::int64_t slot[2];
  of_own_tokens(slots, lane, slot);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int index = 0;
    if (slot[r] >= 0)
      index = generic::load_index(Side::side(), tile_of(slot[r]), static_cast<int>(slot[r]) % kTileTokens,
                                  side.code.num_centroids);
    const std::int64_t row = std::int64_t{side.code.per_head ? head : 0} * side.code.num_centroids + index;
    const float* centroid = side.code.centroids + row * kDim + 8 * t;
#pragma unroll
    for (int j = 0; j < Rows<Side>::kSteps; ++j) {
      const float4 low = __ldg(reinterpret_cast<const float4*>(centroid + 32 * j)),
                   high = __ldg(reinterpret_cast<const float4*>(centroid + 32 * j + 4));
      const float c[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const unsigned words[4] = {raw[r][j].x, raw[r][j].y, raw[r][j].z, raw[r][j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = Pair<T>::to_float(words[i]);
        float x = __fsub_rn(two.x, c[2 * i]), y = __fsub_rn(two.y, c[2 * i + 1]);
        const int channel = 32 * j + 2 * i;
        if (side.signs) {
          const unsigned two_signs = __ldg(reinterpret_cast<const unsigned short*>(side.signs + entry + channel));
          if (two_signs & 0x80u) x = -x;
          if (two_signs & 0x8000u) y = -y;
        }
        rows.x[r][j][2 * i] = x, rows.x[r][j][2 * i + 1] = y;
      }
    }
  }
}

/// Transforms residuals in place.
/// @param matrix  matrix_operand<__nv_bfloat16>() of the side's order
template <typename Side>
__device__ __forceinline__ void rotate_residuals(const WriteSide& side, uint4 matrix, Rows<Side>& rows) {
  using Number = Pair<__nv_bfloat16>;
  constexpr int kSteps = Rows<Side>::kSteps, kTogether = kSteps % 2 == 0 ? 2 : 1, kParts = 3;
  const int order = side.order;
  const unsigned across = order >= 64 ? ~0u : 0u, flip = order >= 64 ? 0x80008000u : 0u;
  const unsigned b[2][2] = {{matrix.x, matrix.y}, {matrix.z, matrix.w}};
  if (order > 1) {  // the sum of a product's parts may be rounded
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int first = 0; first < kSteps; first += kTogether) {
        float c[kTogether][2][4] = {};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          unsigned words[kTogether][4];
#pragma unroll
          for (int j = 0; j < kTogether; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float* x = &rows.x[r][first + j][2 * i];
              words[j][i] = Number::pack(x[0], x[1]);
              const float2 two = Number::to_float(words[j][i]);
              x[0] -= two.x, x[1] -= two.y;
            }
#pragma unroll
          for (int j = 0; j < kTogether; ++j)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const unsigned own_flip = j == 1 ? flip : 0u;
              const auto &own = words[j], &other = words[kTogether - 1 - j];
              Number::mma(c[j][n], own[0], own[1], own[2], own[3], b[n][0] ^ own_flip, b[n][1] ^ own_flip);
              if (kTogether == 2)
                Number::mma(c[j][n], other[0], other[1], other[2], other[3], b[n][0] & across, b[n][1] & across);
            }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              rows.x[r][first + j][4 * n + i] = c[j][n][i];
              rows.x[r][first + j][4 * n + 2 + i] = c[j][n][2 + i];
            }
      }
    add_within_lanes(rows, order);
  }
  rows.row_scale = order > 1 ? ptx::rsqrt_approx(static_cast<float>(order)) : 1.0f;
  rows.rotated = order > 1;
}

}  // namespace kvq::write
