#pragma once

#include <kvq/runtime/kernels/prefill/softmax.cuh>
#include <kvq/runtime/kernels/prefill/traits.cuh>
#include <kvq/runtime/kernels/prefill/work.cuh>

/// Prefill attention for every architecture, with mma.sync. Four warps attend, 16 rows (queries) each. Sub-tiles of the
/// workspace's tiles are copied to shared memory with cp.async in a double buffer.
///
///   thread 4 g + t of a warp    rows g and g + 8    columns 8 i + 2 t, 8 i + 2 t + 1
namespace kvq::prefill {

/// Byte offset of eight channels of a row in panels (device/wgmma.cuh) of `rows` rows.
__device__ __forceinline__ unsigned panel_offset(int rows, int row, int chunk) {
  return static_cast<unsigned>(chunk / 8 * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
}

/// Grid: row_blocks of each work tile of the slab, one after the other.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    prefill_kernel(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillSlab slab) {
  using T = typename Traits::T;
  constexpr int kDim = Traits::kDim, kSubTile = Traits::kSubTile, kRows = Traits::kRows;
  constexpr PrefillTiles kTiles = Traits::kTiles;
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Traits::Shared& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  constexpr int kSubTiles = kTiles.tokens() / kSubTile;  // of a tile
  const Work work(p, slab, static_cast<int>(blockIdx.x), kRows, kSubTile, slab.tiles * kSubTiles);
  if (work.refuse<T>(p, slab, static_cast<int>(blockIdx.x), kDim) || work.empty()) return;

  // 1. Queries into shared memory; rows behind the last row are zeros.
  for (int i = thread; i < kRows * kDim / 8; i += Traits::kThreads) {
    const int row = i / (kDim / 8), chunk = i % (kDim / 8);
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (work.first_row + row < work.rows)
      eight = *(reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) +
                                               work.element(work.first_row + row, p.q_stride, kDim)) +
                chunk);
    *reinterpret_cast<uint4*>(shared.q + panel_offset(kRows, row, chunk)) = infinite_to_nan<T>(eight);
  }

  const std::byte* from = p.workspace + static_cast<std::int64_t>(work.work_tile) * slab.tiles * kTiles.bytes();
  const auto load = [&](int sub_tile, int stage) {
    const std::byte* tile =
        from + static_cast<std::int64_t>(sub_tile / kSubTiles) * kTiles.bytes() + sub_tile % kSubTiles * kSubTile * 128;
    for (int i = thread; i < Traits::kSubTileBytes / 16; i += Traits::kThreads) {
      const int panel = i / (kSubTile * 8), in_panel = i % (kSubTile * 8) * 16;
      const std::byte* at = tile + panel * kTiles.panel_bytes() + in_panel;
      ptx::cp_async_16(ptx::shared_address(shared.k[stage] + i * 16), at);
      ptx::cp_async_16(ptx::shared_address(shared.v[stage] + i * 16), at + kTiles.side_bytes());
    }
    ptx::cp_async_commit_group();
  };
  load(work.first_tile, 0);
  __syncthreads();

  const float score_scale = p.softmax_scale * kLog2e;
  const int row = work.first_row + 16 * warp + g;
  const int2 see[2] = {work.visible(row), work.visible(row + 8)};
  RowSoftmax softmax;
  float out[kDim / 8][4] = {};
  const int matrix_row = lane % 8, matrix = lane / 8;  // of the four that one ldmatrix loads
  for (int sub_tile = work.first_tile, stage = 0; sub_tile < work.tile_end; ++sub_tile, stage ^= 1) {
    if (sub_tile + 1 < work.tile_end) {
      load(sub_tile + 1, stage ^ 1);
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();

    // 2. Scores.
    float scores[kSubTile / 8][4] = {};
    const unsigned queries = ptx::shared_address(shared.q), keys = ptx::shared_address(shared.k[stage]),
                   values = ptx::shared_address(shared.v[stage]);
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      unsigned a[4];
      ptx::ldmatrix_x4(a, queries + panel_offset(kRows, 16 * warp + matrix % 2 * 8 + matrix_row, 2 * s + matrix / 2));
#pragma unroll
      for (int i = 0; i < kSubTile / 16; ++i) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, keys + panel_offset(kSubTile, 16 * i + matrix / 2 * 8 + matrix_row, 2 * s + matrix % 2));
        Pair<T>::mma(scores[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        Pair<T>::mma(scores[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    cap_scores<kSubTile / 2>(p, [&](int i) -> float& { return scores[i / 4][i % 4]; });
    const int first = sub_tile * kSubTile;
    if (!work.whole(first, kSubTile)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int begin = see[r].x - first - 2 * t, end = see[r].y - first - 2 * t;
#pragma unroll
        for (int i = 0; i < kSubTile / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            scores[i][2 * r + e] = 8 * i + e >= begin && 8 * i + e < end ? scores[i][2 * r + e] : kMinusInf;
      }
    }

    // 3. Weights.
    float factor[2];
    softmax.weigh<kSubTile / 4, false>([&](int r, int i) -> float& { return scores[i / 2][2 * r + i % 2]; },
                                       score_scale, factor);
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[i][e] *= factor[e / 2];

    // 4. Values.
#pragma unroll
    for (int s = 0; s < kSubTile / 16; ++s) {
      const unsigned a[4] = {Pair<T>::pack(scores[2 * s][0], scores[2 * s][1]),
                             Pair<T>::pack(scores[2 * s][2], scores[2 * s][3]),
                             Pair<T>::pack(scores[2 * s + 1][0], scores[2 * s + 1][1]),
                             Pair<T>::pack(scores[2 * s + 1][2], scores[2 * s + 1][3])};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(
            b, values + panel_offset(kSubTile, 16 * s + matrix % 2 * 8 + matrix_row, 2 * i + matrix / 2));
        Pair<T>::mma(out[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        Pair<T>::mma(out[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    __syncthreads();  // before the next copies into this stage
  }

  // 5. Results.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const SoftmaxState state = softmax.across_columns(r, score_scale);
    const int mine = row + 8 * r;
    if (mine >= work.rows) continue;
    const int head = work.head * work.heads + mine % work.heads;
    const Finished finished(state, p.sink_logits ? p.sink_logits[head] * kLog2e : kMinusInf);
    unsigned* to = reinterpret_cast<unsigned*>(static_cast<T*>(p.out) + work.element(mine, p.out_stride, kDim)) + t;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
      to[4 * i] = Pair<T>::pack(out[i][2 * r] * finished.factor, out[i][2 * r + 1] * finished.factor);
    if (p.lse && t == 0)
      p.lse[static_cast<std::int64_t>(work.chunk.first_query + mine / work.heads) * p.num_q_heads + head] =
          finished.lse;
  }
}

}  // namespace kvq::prefill
