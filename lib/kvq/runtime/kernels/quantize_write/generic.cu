#include <kvq/runtime/kernels/quantize_write/dense_layout.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/common/generic_rotate.cuh>
#include <kvq/runtime/kernels/common/generic_rows.cuh>
#include <kvq/runtime/kernels/quantize_write/code_rows.cuh>

#include <cuda_runtime.h>

/// Generic write: rotates rows, quantizes and stores them in any format. A block takes 16 tokens of one head and side.
namespace kvq {

namespace generic {

/// Rows [16, D] times a packed dense rotation (RotationLayout): its elements are sums of two 16-bit numbers.
template <typename T>
__device__ __forceinline__ void multiply_packed(GenericRows& rows, int dim, const std::byte* rotation) {
  constexpr int kColumns = kGenericHeadDim / kThreads;
  const RotationLayout layout{dim};
  float sums[kColumns][kTileTokens] = {};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int n = static_cast<int>(threadIdx.x) + i * kThreads;
    if (n >= dim) continue;
#pragma unroll 1
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
        for (int r = 0; r < kTileTokens; ++r) sums[i][r] = fmaf(rows.x[r][channel], m, sums[i][r]);
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int n = static_cast<int>(threadIdx.x) + i * kThreads;
    if (n >= dim) continue;
#pragma unroll
    for (int r = 0; r < kTileTokens; ++r) rows.x[r][RotationLayout::column_channel(n)] = sums[i][r];
  }
  __syncthreads();
}

/// Grid [runs of 16 tokens, 2 Hkv]: keys of all heads, then values.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    generic_write_kernel(const __grid_constant__ WriteParams p, const __grid_constant__ CacheFormat format) {
  __shared__ GenericRows rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const bool value = static_cast<int>(blockIdx.y) >= p.num_kv_heads;
  const int head = static_cast<int>(blockIdx.y) - (value ? p.num_kv_heads : 0);
  const WriteSide& from = value ? p.v : p.k;
  const TileSide& side = format.side(value);
  const int dim = side.head_dim, first = static_cast<int>(blockIdx.x) * kTileTokens;

  // 1. The tokens' destinations and rows.
  bool goes_somewhere = false;
  if (thread < kTileTokens) {
    const bool is_there = first + thread < p.num_tokens;
    rows.page[thread] = is_there ? write::checked_slot(p, p.slot_mapping[first + thread]) : -1;
    rows.window[thread] =
        is_there && p.window_mapping ? write::checked_window_row(p, p.window_mapping[first + thread]) : -1;
    goes_somewhere = rows.page[thread] >= 0 || rows.window[thread] >= 0;
  }
  if (!__syncthreads_or(goes_somewhere)) return;
  for (int i = thread; i < kTileTokens * dim / 8; i += kThreads) {
    const int r = i / (dim / 8), c = i % (dim / 8) * 8, token = min(first + r, p.num_tokens - 1);
    const uint4 eight = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(from.x) + token * from.token_stride +
                                                             static_cast<std::int64_t>(head) * dim + c));
    const T* x = reinterpret_cast<const T*>(&eight);
#pragma unroll
    for (int e = 0; e < 8; ++e) rows.x[r][c + e] = to_float(x[e]);
  }

  // 2. Rotation, then subtraction of the center, which is rotated already.
  const int entry = from.per_head ? head * dim : 0;
  const float row_scale = from.row_scales ? from.row_scales[head] : 1.0f;
  if (from.factors)
    multiply_channels(rows.x[0], kTileTokens, dim, kRowFloats,
                      [&](int c) { return to_float(reinterpret_cast<const T*>(from.factors)[entry + c]) * row_scale; });
  else if (from.signs)
    multiply_channels(rows.x[0], kTileTokens, dim, kRowFloats,
                      [&](int c) { return static_cast<float>(from.signs[entry + c]); });
  if (from.rotation) {
    if (row_scale != 1.0f) multiply_channels(rows.x[0], kTileTokens, dim, kRowFloats, [&](int) { return row_scale; });
    multiply_packed<T>(rows, dim, from.rotation + head * from.rotation_stride);
  }
  if (from.order > 1) transform_blocks(rows.x[0], kTileTokens, dim, kRowFloats, from.order);
  __syncthreads();
  if (from.center) {
    for (int i = thread; i < kTileTokens * dim; i += kThreads)
      rows.x[i / dim][i % dim] = __fsub_rn(rows.x[i / dim][i % dim], from.center[head * dim + i % dim]);
    __syncthreads();
  }

  // 3. As bfloat16 into the windows, quantized into the pages.
  for (int i = warp; i < kTileTokens; i += kWarps) {
    if (rows.window[i] < 0) continue;
    std::byte* tile = write::window_tiles(p, rows.window[i], head) + (value ? p.ring_layout.k.bytes() : 0);
    const TileSide in_order{dim, 16, dim, 0};
    store_exact(rows.x[i], dim, value ? format.v : in_order, tile, static_cast<int>(rows.window[i] % kTileTokens),
                lane);
  }
  __syncthreads();
  code_rows(rows, format, value, from.rule, from.clip_ranks ? from.clip_ranks[head] : 0,
            page_tiles(p.pages, p.page_stride, p.page_shift, format, p.num_kv_heads, head, value));
}

namespace {

template <typename T>
Status plan_write(WriteLaunch&) {
  return cuda_status(load_kernel(generic_write_kernel<T>), "quantize_write: generic: plan");
}

template <typename T>
Status run_write(const WriteLaunch& launch, const WriteParams& params, CUstream_st* stream) {
  if (params.num_tokens == 0) return {};
  const dim3 grid(static_cast<unsigned>((params.num_tokens + kTileTokens - 1) / kTileTokens),
                  static_cast<unsigned>(2 * params.num_kv_heads));
  return cuda_status(launch_kernel(generic_write_kernel<T>, grid, kThreads, 0, false, stream, params, launch.format),
                     "quantize_write: generic: launch");
}

}  // namespace

}  // namespace generic

WriteVariant generic_write(const CacheFormat& format, bool bf16) {
  return {
      .name = bf16 ? "quantize_write_generic_bf16" : "quantize_write_generic_fp16",
      .k = format.k,
      .v = format.v,
      .k_bfloat = format.k_bfloat,
      .v_bfloat = format.v_bfloat,
      .bf16 = bf16,
      .plan_kernel = bf16 ? generic::plan_write<__nv_bfloat16> : generic::plan_write<__half>,
      .run = bf16 ? generic::run_write<__nv_bfloat16> : generic::run_write<__half>,
      .tuned = false,
  };
}

}  // namespace kvq
