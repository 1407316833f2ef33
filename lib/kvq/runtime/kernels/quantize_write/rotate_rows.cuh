#pragma once

#include <kvq/runtime/kernels/common/write_side.h>
#include <kvq/runtime/kernels/quantize_write/dense_layout.h>
#include <kvq/runtime/kernels/common/generic_tiles.cuh>
#include <kvq/runtime/kernels/common/row_teams.cuh>

/// Rotations of rows of any head_dim and 16-bit type, without tensor cores. The type is known at run time, because
/// kernels with searches of all trellises take long to compile.
namespace kvq::generic {

/// A number of 16 bits. @param bf16  it is a bfloat16, else fp16
__device__ __forceinline__ float from_16_bits(std::uint16_t bits, bool bf16) {
  return bf16 ? __uint_as_float(static_cast<unsigned>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

/// Calls f() with a number of the type.
template <typename F>
__device__ __forceinline__ void with_16_bit_type(bool bf16, F f) {
  if (bf16)
    f(__nv_bfloat16());
  else
    f(__half());
}

/// Rows [kRows, kMostDim] times a packed dense rotation (RotationLayout), in place: its elements are sums of two 16-bit
/// numbers. All threads of the block call it; begins and ends with a barrier.
template <typename T, int kRows, int kMostDim>
__device__ __forceinline__ void multiply_packed(float (*rows)[kMostDim], int dim, const std::byte* rotation) {
  constexpr int kColumns = kMostDim / kThreads;
  const RotationLayout layout{dim};
  float sums[kColumns][kRows] = {};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int n = static_cast<int>(threadIdx.x) + i * kThreads;
    if (n >= dim) continue;
    // With few rows there is little else to do while loads are in flight, so there are more loads.
#pragma unroll(kRows == 1 ? 8 : kRows <= 4 ? 4 : 1)
    for (int k = 0; k < dim; k += 8) {  // eight rows of R that are adjacent in the layout
      const int slab = k / RotationLayout::kSlabRows, in_slab = k % RotationLayout::kSlabRows;
      const uint4 high = __ldg(reinterpret_cast<const uint4*>(rotation + layout.offset(slab, 0, in_slab, n))),
                  low = __ldg(reinterpret_cast<const uint4*>(rotation + layout.offset(slab, 1, in_slab, n)));
      const T *h = reinterpret_cast<const T*>(&high), *l = reinterpret_cast<const T*>(&low);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float m = to_float(h[e]) + to_float(l[e]);
        const int channel = RotationLayout::row_channel(slab, in_slab + e);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[i][r] = fmaf(rows[r][channel], m, sums[i][r]);
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int n = static_cast<int>(threadIdx.x) + i * kThreads;
    if (n >= dim) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r][RotationLayout::column_channel(n)] = sums[i][r];
  }
  __syncthreads();
}

/// What rows are multiplied by, but for dense rotations. All lanes of a warp call it.
/// @param x     0 behind the last channel
/// @param bf16  type of WriteSide::factors
/// @param head  of the rows
template <int kMostDim, typename Team>
__device__ __forceinline__ void rotate_rows(TeamRow<Team, kMostDim>& x, const WriteSide& from, bool bf16, int dim,
                                            int head, Team team) {
  const int entry = from.per_head ? head * dim : 0;
  const float row_scale = from.row_scales ? from.row_scales[head] : 1.0f;
  if (from.factors) {
    for_each_slot<Team, kMostDim>(
        team, dim, [&](int j, int c) { x[j] *= from_16_bits(from.factors[entry + c], bf16) * row_scale; });
  } else if (from.signs) {
    for_each_slot<Team, kMostDim>(team, dim, [&](int j, int c) { x[j] *= static_cast<float>(from.signs[entry + c]); });
  }
  if (from.rotation && row_scale != 1.0f)
#pragma unroll
    for (float& own : x) own *= row_scale;
  if (from.order <= 1) return;
  transform(x, from.order, team);
  const float norm = __frcp_rn(__fsqrt_rn(static_cast<float>(from.order)));
#pragma unroll
  for (float& own : x) own *= norm;
}

}  // namespace kvq::generic
