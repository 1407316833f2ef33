#include <kvq/runtime/kernels/common/prefill_rows.h>
#include <kvq/runtime/kernels/prefill/variant.h>
#include <kvq/device/launch.cuh>
#include <kvq/runtime/kernels/prefill/softmax.cuh>
#include <kvq/runtime/kernels/prefill/work.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

/// Generic prefill: attention of new tokens over dequantized rows of a cache of any format, with mma.sync. Four warps
/// attend, 16 rows each, to 32 tokens at a time, without the double buffer of prefill/kernel.cuh.
///
///   thread 4 g + t of a warp    rows g and g + 8    columns 8 i + 2 t, 8 i + 2 t + 1
namespace kvq {

namespace generic {

using prefill::Finished;
using prefill::Work;

constexpr int kPrefillWarps = 4, kPrefillThreads = 32 * kPrefillWarps, kBlockRows = 16 * kPrefillWarps;
constexpr int kTokens = PrefillRows::kTokens;

/// Bytes from row to row in shared memory: an odd number of 16-byte chunks, so that ldmatrix reads eight rows without
/// bank conflicts.
KVQ_HD constexpr int padded_bytes(int dim) { return dim * 2 + 16; }
constexpr int prefill_shared_bytes(int k_dim, int v_dim) {
  return (kBlockRows + kTokens) * padded_bytes(k_dim) + kTokens * padded_bytes(v_dim);
}

/// Copies rows [rows, dim] of 16-bit numbers to shared memory. All threads of the block call it.
template <typename RowOf>
__device__ __forceinline__ void load_rows(std::byte* to, int rows, int dim, RowOf row_of) {
  const int chunks = dim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += kPrefillThreads) {
    const void* row = row_of(i / chunks);
    *reinterpret_cast<uint4*>(to + i / chunks * padded_bytes(dim) + i % chunks * 16) =
        row ? __ldg(static_cast<const uint4*>(row) + i % chunks) : make_uint4(0, 0, 0, 0);
  }
}

/// Grid: row_blocks of each work tile of the slab, one after the other. @tparam kMaxDim  D of V at most
template <typename T, int kMaxDim>
__global__ void __launch_bounds__(kPrefillThreads)
    generic_prefill_kernel(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillSlab slab, int k_dim,
                           int v_dim) {
  extern __shared__ __align__(16) std::byte shared[];
  std::byte* keys = shared + kBlockRows * padded_bytes(k_dim);
  std::byte* values = keys + kTokens * padded_bytes(k_dim);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const Work work(p, slab, static_cast<int>(blockIdx.x), kBlockRows, kTokens, slab.tiles);
  if (work.refuse<T>(p, slab, static_cast<int>(blockIdx.x), v_dim) || work.empty()) return;
  load_rows(shared, kBlockRows, k_dim, [&](int row) -> const void* {
    return work.first_row + row < work.rows
               ? static_cast<const T*>(p.q) + work.element(work.first_row + row, p.q_stride, k_dim)
               : nullptr;
  });
  for (int i = thread; i < kBlockRows * k_dim / 8; i += kPrefillThreads) {  // each thread the chunks that it stored
    uint4& eight = *reinterpret_cast<uint4*>(shared + i / (k_dim / 8) * padded_bytes(k_dim) + i % (k_dim / 8) * 16);
    eight = infinite_to_nan<T>(eight);
  }
  const PrefillRows layout{k_dim, v_dim};
  const std::byte* work_tile = p.workspace + work.work_tile * layout.work_tile_bytes(slab.tiles);

  const float score_scale = p.softmax_scale * kLog2e;
  const int row = work.first_row + 16 * warp + g;
  const int2 see[2] = {work.visible(row), work.visible(row + 8)};
  prefill::RowSoftmax softmax;
  float out[kMaxDim / 8][4] = {};
  const int matrix_row = lane % 8, matrix = lane / 8;  // of the four that one ldmatrix loads
  const auto address_of = [](const std::byte* rows, int dim, int row_in, int chunk) {
    return ptx::shared_address(rows + row_in * padded_bytes(dim) + chunk * 16);
  };
  for (int tile = work.first_tile; tile < work.tile_end; ++tile) {
    const int first = tile * kTokens;
    __syncthreads();
    load_rows(keys, kTokens, k_dim, [&](int i) { return work_tile + layout.row(slab.tiles, first + i, false); });
    load_rows(values, kTokens, v_dim, [&](int i) { return work_tile + layout.row(slab.tiles, first + i, true); });
    __syncthreads();

    // 1. Scores.
    float scores[kTokens / 8][4] = {};
#pragma unroll 2
    for (int s = 0; s < k_dim / 16; ++s) {
      unsigned a[4];
      ptx::ldmatrix_x4(a, address_of(shared, k_dim, 16 * warp + matrix % 2 * 8 + matrix_row, 2 * s + matrix / 2));
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, address_of(keys, k_dim, 16 * i + matrix / 2 * 8 + matrix_row, 2 * s + matrix % 2));
        Pair<T>::mma(scores[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        Pair<T>::mma(scores[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }

    // 2. Weights.
    prefill::cap_scores<kTokens / 2>(p, [&](int i) -> float& { return scores[i / 4][i % 4]; });
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int position = first + 8 * i + 2 * t + e;
          if (position < see[r].x || position >= see[r].y) scores[i][2 * r + e] = kMinusInf;
        }
    float factor[2];
    softmax.weigh<kTokens / 4, false>([&](int r, int i) -> float& { return scores[i / 2][2 * r + i % 2]; }, score_scale,
                                      factor);
#pragma unroll
    for (int i = 0; i < kMaxDim / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[i][e] *= factor[e / 2];

    // 3. Values.
#pragma unroll
    for (int s = 0; s < kTokens / 16; ++s) {
      const unsigned a[4] = {Pair<T>::pack(scores[2 * s][0], scores[2 * s][1]),
                             Pair<T>::pack(scores[2 * s][2], scores[2 * s][3]),
                             Pair<T>::pack(scores[2 * s + 1][0], scores[2 * s + 1][1]),
                             Pair<T>::pack(scores[2 * s + 1][2], scores[2 * s + 1][3])};
#pragma unroll
      for (int i = 0; i < kMaxDim / 16; ++i) {
        if (16 * i >= v_dim) break;
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b, address_of(values, v_dim, 16 * s + matrix % 2 * 8 + matrix_row, 2 * i + matrix / 2));
        Pair<T>::mma(out[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        Pair<T>::mma(out[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  // 4. Results.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const SoftmaxState state = softmax.across_columns(r, score_scale);
    const int mine = row + 8 * r;
    if (mine >= work.rows) continue;
    const int head = work.head * work.heads + mine % work.heads;
    const Finished finished(state, p.sink_logits ? p.sink_logits[head] * kLog2e : kMinusInf);
    unsigned* to = reinterpret_cast<unsigned*>(static_cast<T*>(p.out) + work.element(mine, p.out_stride, v_dim)) + t;
#pragma unroll
    for (int i = 0; i < kMaxDim / 8; ++i)
      if (8 * i < v_dim)
        to[4 * i] = Pair<T>::pack(out[i][2 * r] * finished.factor, out[i][2 * r + 1] * finished.factor);
    if (p.lse && t == 0)
      p.lse[static_cast<std::int64_t>(work.chunk.first_query + mine / work.heads) * p.num_q_heads + head] =
          finished.lse;
  }
}

namespace {

template <typename T>
auto prefill_kernel(int v_dim) {
  return v_dim <= 128 ? generic_prefill_kernel<T, 128> : generic_prefill_kernel<T, kGenericHeadDim>;
}

template <typename T>
Status plan_prefill(const DequantizeVariant& rows, PrefillLaunch& launch) {
  static_assert(prefill_shared_bytes(kGenericHeadDim, kGenericHeadDim) <= 99 * 1024,
                "what a block has on every architecture");
  const int k_dim = rows.k.head_dim, v_dim = rows.v.head_dim;
  const Status status = generic_prefill_rows_blocks(rows, launch.dequantize.blocks);
  if (!status.ok()) return status;
  launch.shared_bytes = prefill_shared_bytes(k_dim, v_dim);
  // The maximum over all plans, because the attribute belongs to the kernel on the device and other plans may need
  // more.
  cudaError_t error = load_kernel(prefill_kernel<T>(v_dim));
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(prefill_kernel<T>(v_dim), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 prefill_shared_bytes(kGenericHeadDim, v_dim <= 128 ? 128 : kGenericHeadDim));
  if (error != cudaSuccess) return cuda_status(error, "prefill: generic: plan");
  take_slab(launch, kBlockRows, kTokens, PrefillRows{k_dim, v_dim}.work_tile_bytes(1));
  return {};
}

template <typename T>
Status run_prefill(const DequantizeVariant& rows, const PrefillLaunch& launch, const PrefillParams& params,
                   CUstream_st* stream) {
  const int work_tiles = params.cache.batch * params.cache.num_kv_heads, k_dim = rows.k.head_dim,
            v_dim = rows.v.head_dim;
  PrefillSlab slab = launch.slab;
  if (slab.row_blocks == 0 || slab.tiles == 0) return {};
  for (slab.first_work_tile = 0; slab.first_work_tile < work_tiles; slab.first_work_tile += launch.slab.work_tiles) {
    slab.work_tiles = std::min(launch.slab.work_tiles, work_tiles - slab.first_work_tile);
    const Status status = generic_prefill_rows(rows, launch.dequantize.blocks, params, slab, stream);
    if (!status.ok()) return status;
    const cudaError_t error =
        launch_kernel(prefill_kernel<T>(v_dim), static_cast<unsigned>(slab.work_tiles * slab.row_blocks),
                      kPrefillThreads, launch.shared_bytes, false, stream, params, slab, k_dim, v_dim);
    if (error != cudaSuccess) return cuda_status(error, "prefill: generic: launch");
  }
  return {};
}

}  // namespace

}  // namespace generic

PrefillVariant generic_prefill(const DequantizeVariant& rows) {
  PrefillVariant variant{
      .name = rows.bf16 ? "prefill_generic_bf16" : "prefill_generic_fp16",
      .head_dim = rows.k.head_dim,
      .bf16 = rows.bf16,
  };
  variant.plan = rows.bf16 ? generic::plan_prefill<__nv_bfloat16> : generic::plan_prefill<__half>;
  variant.run = rows.bf16 ? generic::run_prefill<__nv_bfloat16> : generic::run_prefill<__half>;
  variant.tuned = false;
  return variant;
}

}  // namespace kvq
