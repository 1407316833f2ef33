#pragma once

#include <kvq/runtime/kernels/prefill/work.cuh>

/// Prefill attention for every architecture, with mma.sync. Four warps attend, 16 rows (queries) each. Pieces (KV
/// chunks) of the workspace's tiles are copied to shared memory with cp.async in a double buffer.
///
///   thread 4 g + t of a warp    rows g and g + 8    columns 8 i + 2 t, 8 i + 2 t + 1
namespace kvq::prefill {

template <int kDimArg, typename TArg>
struct Traits {
  using T = TArg;
  static constexpr int kDim = kDimArg;
  static constexpr PrefillTiles kTiles{kDim};
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kPiece = kDim <= 128 ? 64 : 32;   ///< tokens of a piece (KV chunk)
  static constexpr int kPieceBytes = kPiece * kDim * 2;  ///< of one side
  static_assert(kDim % 64 == 0 && kTiles.tokens() % kPiece == 0);
  struct Shared {
    alignas(128) unsigned char q[kRows * kDim * 2];
    alignas(128) unsigned char k[2][kPieceBytes];
    alignas(128) unsigned char v[2][kPieceBytes];
  };
};

/// Byte offset of eight channels of a row in panels (device/wgmma.cuh) of `rows` rows.
__device__ __forceinline__ unsigned panel_offset(int rows, int row, int chunk) {
  return static_cast<unsigned>(chunk / 8 * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
}

/// Grid: row_blocks of each item of the slab, item by item.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    prefill_kernel(const __grid_constant__ PrefillParams p, const __grid_constant__ PrefillSlab slab) {
  using T = typename Traits::T;
  constexpr int kDim = Traits::kDim, kPiece = Traits::kPiece, kRows = Traits::kRows;
  constexpr PrefillTiles kTiles = Traits::kTiles;
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Traits::Shared& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  constexpr int kPieces = kTiles.tokens() / kPiece;  // of a tile
  const Work work(p, slab, static_cast<int>(blockIdx.x), kRows, kPiece, slab.tiles * kPieces);
  if (work.empty()) return;

  // 1. Queries into shared memory; rows behind the last row are zeros.
  for (int i = thread; i < kRows * kDim / 8; i += Traits::kThreads) {
    const int row = i / (kDim / 8), chunk = i % (kDim / 8);
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (work.first_row + row < work.rows)
      eight = *(reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) +
                                               work.element(work.first_row + row, p.q_stride, kDim)) +
                chunk);
    *reinterpret_cast<uint4*>(shared.q + panel_offset(kRows, row, chunk)) = eight;
  }

  const std::byte* from = p.workspace + static_cast<std::int64_t>(work.item) * slab.tiles * kTiles.bytes();
  const auto load = [&](int piece, int stage) {
    const std::byte* tile =
        from + static_cast<std::int64_t>(piece / kPieces) * kTiles.bytes() + piece % kPieces * kPiece * 128;
    for (int i = thread; i < Traits::kPieceBytes / 16; i += Traits::kThreads) {
      const int panel = i / (kPiece * 8), in_panel = i % (kPiece * 8) * 16;
      const std::byte* at = tile + panel * kTiles.panel_bytes() + in_panel;
      ptx::cp_async_16(ptx::shared_address(shared.k[stage] + i * 16), at);
      ptx::cp_async_16(ptx::shared_address(shared.v[stage] + i * 16), at + kTiles.side_bytes());
    }
    ptx::cp_async_commit_group();
  };
  load(work.first_tile, 0);
  __syncthreads();

  const float unit = p.softmax_scale * kLog2e;
  const int row = work.first_row + 16 * warp + g;
  const int2 see[2] = {work.visible(row), work.visible(row + 8)};
  float max[2] = {kMinusInf, kMinusInf}, sum[2] = {0.0f, 0.0f};
  float out[kDim / 8][4] = {};
  const int matrix_row = lane % 8, matrix = lane / 8;  // of the four that one ldmatrix loads
  for (int piece = work.first_tile, stage = 0; piece < work.tile_end; ++piece, stage ^= 1) {
    if (piece + 1 < work.tile_end) {
      load(piece + 1, stage ^ 1);
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();

    // 2. Scores.
    float scores[kPiece / 8][4] = {};
    const unsigned queries = ptx::shared_address(shared.q), keys = ptx::shared_address(shared.k[stage]),
                   values = ptx::shared_address(shared.v[stage]);
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      unsigned a[4];
      ptx::ldmatrix_x4(a, queries + panel_offset(kRows, 16 * warp + matrix % 2 * 8 + matrix_row, 2 * s + matrix / 2));
#pragma unroll
      for (int i = 0; i < kPiece / 16; ++i) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, keys + panel_offset(kPiece, 16 * i + matrix / 2 * 8 + matrix_row, 2 * s + matrix % 2));
        Pair<T>::mma(scores[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        Pair<T>::mma(scores[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    const int first = piece * kPiece;
    if (!work.whole(first, kPiece)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int begin = see[r].x - first - 2 * t, end = see[r].y - first - 2 * t;
#pragma unroll
        for (int i = 0; i < kPiece / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            scores[i][2 * r + e] = 8 * i + e >= begin && 8 * i + e < end ? scores[i][2 * r + e] : kMinusInf;
      }
    }

    // 3. Weights.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = max[r];
#pragma unroll
      for (int i = 0; i < kPiece / 8; ++i) largest = fmaxf(largest, fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
      const float top = largest == kMinusInf ? 0.0f : largest * unit, factor = ptx::ex2(fmaf(max[r], unit, -top));
      max[r] = largest;
      sum[r] *= factor;
#pragma unroll
      for (int i = 0; i < kPiece / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[i][2 * r + e];
          score = ptx::ex2(fmaf(score, unit, -top));
          sum[r] += score;
        }
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) out[i][2 * r] *= factor, out[i][2 * r + 1] *= factor;
    }

    // 4. Values.
#pragma unroll
    for (int s = 0; s < kPiece / 16; ++s) {
      const unsigned a[4] = {Pair<T>::pack(scores[2 * s][0], scores[2 * s][1]),
                             Pair<T>::pack(scores[2 * s][2], scores[2 * s][3]),
                             Pair<T>::pack(scores[2 * s + 1][0], scores[2 * s + 1][1]),
                             Pair<T>::pack(scores[2 * s + 1][2], scores[2 * s + 1][3])};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b,
                               values + panel_offset(kPiece, 16 * s + matrix % 2 * 8 + matrix_row, 2 * i + matrix / 2));
        Pair<T>::mma(out[2 * i], a[0], a[1], a[2], a[3], b[0], b[1]);
        Pair<T>::mma(out[2 * i + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    __syncthreads();  // before the next copies into this stage
  }

  // 5. Results.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(kAll, sum[r], 1);
    sum[r] += __shfl_xor_sync(kAll, sum[r], 2);
    const int mine = row + 8 * r;
    if (mine >= work.rows) continue;
    const int head = work.head * work.heads + mine % work.heads;
    const Finished finished(max[r] * unit, sum[r], p.sink_logits ? p.sink_logits[head] * kLog2e : kMinusInf);
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
